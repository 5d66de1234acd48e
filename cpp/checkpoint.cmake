# The int8 checkpoint copy: a core without torch, CUDA kernels where there is a CUDA compiler, and
# torch operators where the environment being installed into has torch.

set(STATECACHE_CUDA
    AUTO
    CACHE STRING "CUDA kernels of the checkpoint copy: AUTO, ON or OFF")
set(STATECACHE_OPS
    AUTO
    CACHE STRING "Torch operators of the checkpoint copy: AUTO, ON or OFF")
set_property(CACHE STATECACHE_CUDA STATECACHE_OPS PROPERTY STRINGS AUTO ON OFF)
foreach(switch IN ITEMS STATECACHE_CUDA STATECACHE_OPS)
  if(NOT ${switch} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "statecache: ${switch} is '${${switch}}': use AUTO, ON or OFF")
  endif()
endforeach()
set(STATECACHE_TORCH_DIR
    ""
    CACHE PATH "Folder of the torch package, if it is not found by itself")

# Core. Its loops are vectorised only if the compiler may compute both sides of a selection.
add_library(statecache_checkpoint STATIC src/checkpoint_copy_cpu.cpp)
target_include_directories(statecache_checkpoint PUBLIC include)
target_compile_options(
  statecache_checkpoint
  PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O3
          -fno-trapping-math
          -Wall
          -Wextra
          -Wconversion
          -Wshadow
          -Werror>)

# Torch: headers and one library of the environment being installed into. Never find_package(Torch):
# it asks for a whole CUDA toolkit. Never a build requirement: that would download it.
set(torch_dir "")
if(STATECACHE_PYTHON AND NOT STATECACHE_OPS STREQUAL "OFF")
  if(STATECACHE_TORCH_DIR)
    set(torch_dir "${STATECACHE_TORCH_DIR}")
    if(NOT EXISTS "${torch_dir}/include/torch/headeronly/version.h")
      message(FATAL_ERROR "statecache: STATECACHE_TORCH_DIR is '${torch_dir}', which holds no "
                          "torch >= 2.11: name the folder of the torch package")
    endif()
  else()
    execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_torch.py
                    OUTPUT_VARIABLE torch_dir COMMAND_ERROR_IS_FATAL ANY)
  endif()
  set(torch_version 0)
  if(torch_dir)
    file(STRINGS "${torch_dir}/include/torch/headeronly/version.h" version_lines
         REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
    string(REGEX REPLACE "[^0-9]+([0-9]+)" ".\\1" torch_version "${version_lines}")
    string(REGEX REPLACE "^\\.([0-9]+)[^0-9]+([0-9]+).*" "\\1.\\2" torch_version "${torch_version}")
  endif()
  if(torch_version VERSION_LESS 2.11)
    set(why "no torch >= 2.11 in the environment of ${Python_EXECUTABLE}")
    if(STATECACHE_OPS STREQUAL "ON")
      message(FATAL_ERROR "statecache: STATECACHE_OPS=ON, but ${why}")
    endif()
    message(STATUS "statecache: building the index alone, without the checkpoint copies: ${why}")
    set(torch_dir "")
  else()
    message(STATUS "statecache: checkpoint copies for torch ${torch_version} in ${torch_dir}")
  endif()
endif()

# CUDA: only of use to the operators.
set(with_cuda OFF)
if(torch_dir AND NOT STATECACHE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  find_program(nvcc nvcc NO_CACHE)
  if(nvcc AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE nvcc_version)
    string(REGEX MATCH "release ([0-9.]+)" _ "${nvcc_version}")
    if(CMAKE_MATCH_1 VERSION_LESS 12.8)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    else()
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 120)
    endif()
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(with_cuda ON)
  elseif(STATECACHE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "statecache: STATECACHE_CUDA=ON, but there is no CUDA compiler (nvcc)")
  else()
    message(STATUS "statecache: checkpoint copies for the CPU alone: no CUDA compiler (nvcc)")
  endif()
elseif(STATECACHE_CUDA STREQUAL "ON" AND NOT torch_dir)
  message(FATAL_ERROR "statecache: STATECACHE_CUDA=ON needs the torch operators")
endif()
# Before 2.13 the current stream is asked of a library that torch for the CPU has not.
set(torch_cuda "")
if(with_cuda AND torch_version VERSION_LESS 2.13)
  set(torch_cuda "${torch_dir}/lib/libtorch_cuda.so")
  if(NOT EXISTS "${torch_cuda}")
    message(STATUS "statecache: checkpoint copies for the CPU alone: torch ${torch_version} is")
    set(with_cuda OFF)
    set(torch_cuda "")
  endif()
endif()
if(with_cuda)
  add_library(statecache_checkpoint_cuda STATIC src/checkpoint_copy_cuda.cu)
  target_include_directories(statecache_checkpoint_cuda PUBLIC include)
  # C++17 there: CMake 3.25 cannot ask CUDA 13 for more.
  set_target_properties(statecache_checkpoint_cuda PROPERTIES CUDA_STANDARD 17 CUDA_RUNTIME_LIBRARY
                                                                               Static)
endif()

if(torch_dir)
  # By hand what python_add_library(USE_SABI) does from CMake 3.26 on.
  add_library(_checkpoint_ops MODULE bindings/checkpoint_ops.cpp)
  set_target_properties(
    _checkpoint_ops
    PROPERTIES PREFIX ""
               SUFFIX ".abi3.so"
               SKIP_BUILD_RPATH ON
               CUDA_RUNTIME_LIBRARY Static)
  # The oldest torch that this build is for.
  set(torch_target 0x020d000000000000ULL)
  if(torch_version VERSION_LESS 2.13)
    set(torch_target 0x020b000000000000ULL)
  endif()
  target_compile_definitions(_checkpoint_ops PRIVATE Py_LIMITED_API=0x030b0000
                                                     TORCH_TARGET_VERSION=${torch_target})
  if(with_cuda)
    string(REPLACE ";" "," architectures "${CMAKE_CUDA_ARCHITECTURES}")
    target_compile_definitions(
      _checkpoint_ops PRIVATE STATECACHE_WITH_CUDA STATECACHE_CUDA_ARCHITECTURES="${architectures}")
  endif()
  target_compile_options(_checkpoint_ops PRIVATE -Wall -Wextra -Wshadow -Werror)
  target_include_directories(_checkpoint_ops SYSTEM PRIVATE ${torch_dir}/include)
  # Loaded already when the module is imported: no path to it is recorded.
  target_link_libraries(
    _checkpoint_ops
    PRIVATE statecache_checkpoint Python::Module $<$<BOOL:${with_cuda}>:statecache_checkpoint_cuda>
            ${torch_dir}/lib/libtorch_cpu.so ${torch_cuda})
  install(TARGETS _checkpoint_ops LIBRARY DESTINATION statecache)
endif()

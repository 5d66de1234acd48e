#include <Python.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "checkpoint_arguments.h"
#include "statecache/checkpoint_copy.h"

// Only torch's stable ABI is used: one binary serves every torch from the one it is built for on,
// with and without CUDA. Schemas and meaning: plugin/statecache/checkpoint/ops.py.

// The stable ABI names a stream itself from 2.13 on; before, libtorch_cuda does. Older headers have
// no name for that version.
#define STATECACHE_TORCH_NAMES_STREAMS (TORCH_TARGET_VERSION >= 0x020d000000000000ULL)
#if defined(STATECACHE_WITH_CUDA) && !STATECACHE_TORCH_NAMES_STREAMS
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace {

using statecache::address;
using statecache::checked_report;
using statecache::checked_row;
using statecache::CheckpointCopy;
using statecache::describe;
using statecache::kMaxLayers;
using statecache::kMaxRowLayers;
using statecache::kMaxRowShapes;
using statecache::Layers;
using statecache::on_one_device;
using statecache::RowCopy;
using statecache::Rows;
using statecache::RowShape;
using statecache::slot_list;
using statecache::temporal_layers;
using statecache::Tensors;
using torch::stable::Tensor;

// Calls `launch` with all layers, at most kMaxLayers at a time.
template <typename Launch>
void for_layers(CheckpointCopy copy, const Layers& active, const Tensor& quantized,
                const Tensor& scale, const Launch& launch) {
  if (copy.listed == 0 || copy.heads == 0 || copy.d_v == 0 || copy.d_k == 0) return;
  for (int64_t begin = 0; begin < active.count(); begin += kMaxLayers) {
    const int64_t layers = std::min<int64_t>(kMaxLayers, active.count() - begin);
    for (int64_t l = 0; l < layers; ++l) copy.active[l] = active.layer(begin + l);
    copy.quantized = address(quantized) + begin * copy.quantized_layer_stride;
    copy.scale = address(scale) + begin * copy.scale_layer_stride;
    copy.layers = static_cast<int32_t>(layers);
    launch(copy);
  }
}

template <typename Launch>
void store(const Tensors& active_tensors, const Tensor& quantized, const Tensor& scale,
           const Tensor& report, const Tensor& active_slots, const Tensor& slots,
           const Launch& launch) {
  const Layers active = temporal_layers(active_tensors);
  CheckpointCopy copy = describe(active, quantized, scale, active_slots, slots);
  copy.report = checked_report(active.first(), report, copy.listed);
  for_layers(copy, active, quantized, scale, launch);
}

template <typename Launch>
void load(const Tensor& quantized, const Tensor& scale, const Tensors& active_tensors,
          const Tensor& slots, const Tensor& active_slots, const Launch& launch) {
  const Layers active = temporal_layers(active_tensors);
  for_layers(describe(active, quantized, scale, active_slots, slots), active, quantized, scale,
             launch);
}

// Gathers layers into one copy; a full one is launched.
template <typename Launch>
class RowLauncher {
 public:
  RowLauncher(const RowCopy& empty, const Launch& launch) : copy_(empty), launch_(launch) {}

  void add(const Rows& source, const Rows& target, int64_t row_bytes) {
    const RowShape shape{source.slot_stride(), target.slot_stride(), row_bytes};
    const int64_t layers = source.layers();
    for (int64_t l = 0; l < layers; ++l) {
      if (copy_.layers == kMaxRowLayers) flush();
      const int index = index_of(shape);
      copy_.source[copy_.layers] = source.layer(l);
      copy_.target[copy_.layers] = target.layer(l);
      copy_.shape[copy_.layers] = static_cast<uint8_t>(index);
      ++copy_.layers;
    }
  }

  void flush() {
    if (copy_.layers > 0) launch_(copy_);
    copy_.layers = copy_.shape_count = 0;
  }

 private:
  int index_of(const RowShape& shape) {
    for (int i = copy_.shape_count - 1; i >= 0; --i) {
      const RowShape& known = copy_.shapes[i];
      if (known.source_slot_stride == shape.source_slot_stride &&
          known.target_slot_stride == shape.target_slot_stride &&
          known.row_bytes == shape.row_bytes) {
        return i;
      }
    }
    if (copy_.shape_count == kMaxRowShapes) flush();
    copy_.shapes[copy_.shape_count] = shape;
    return copy_.shape_count++;
  }

  RowCopy copy_;
  const Launch& launch_;
};

template <typename Launch>
void move(const Tensors& sources, const Tensors& targets, const Tensor& source_slots,
          const Tensor& target_slots, const std::vector<int64_t>& slot_dims,
          const std::optional<Tensor>& report, const Launch& launch) {
  STD_TORCH_CHECK(sources.size() == targets.size() && sources.size() == slot_dims.size(),
                  "statecache: as many sources as targets and slot dimensions were expected");
  if (sources.empty()) return;
  RowCopy copy{};
  copy.source_slot_count = Rows(sources[0], slot_dims[0]).slots();
  copy.target_slot_count = Rows(targets[0], slot_dims[0]).slots();
  std::vector<int64_t> row_bytes;
  row_bytes.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    row_bytes.push_back(checked_row(sources[i], targets[i], slot_dims[i]));
    STD_TORCH_CHECK(Rows(sources[i], slot_dims[i]).slots() == copy.source_slot_count &&
                        Rows(targets[i], slot_dims[i]).slots() == copy.target_slot_count &&
                        on_one_device(sources[i], sources[0]),
                    "statecache: tensors of one copy differ in slots or device");
  }
  const int64_t listed = source_slots.numel();
  copy.source_slots = slot_list(sources[0], source_slots, listed);
  copy.target_slots = slot_list(sources[0], target_slots, listed);
  copy.listed = static_cast<int32_t>(listed);
  if (report) copy.report = checked_report(sources[0], *report, listed);
  if (listed == 0) return;
  RowLauncher rows(copy, launch);
  for (size_t i = 0; i < sources.size(); ++i) {
    if (row_bytes[i] == 0) continue;
    rows.add(Rows(sources[i], slot_dims[i]), Rows(targets[i], slot_dims[i]), row_bytes[i]);
  }
  rows.flush();
}

template <typename Copy, typename Tiles>
void run_tiles(const Copy& copy, const Tiles& tiles) {
  torch::stable::parallel_for(0, statecache::tile_count(copy), 1,
                              [&](int64_t first, int64_t last) { tiles(copy, first, last); });
}

void store_cpu(const Tensors active, Tensor quantized, Tensor scale, Tensor report,
               const Tensor active_slots, const Tensor slots) {
  store(active, quantized, scale, report, active_slots, slots, [](const CheckpointCopy& copy) {
    run_tiles(copy, [](const CheckpointCopy& c, int64_t first, int64_t last) {
      statecache::quantize_tiles(c, first, last);
    });
  });
}

void load_cpu(const Tensor quantized, const Tensor scale, Tensors active, const Tensor slots,
              const Tensor active_slots) {
  load(quantized, scale, active, slots, active_slots, [](const CheckpointCopy& copy) {
    run_tiles(copy, [](const CheckpointCopy& c, int64_t first, int64_t last) {
      statecache::dequantize_tiles(c, first, last);
    });
  });
}

void move_cpu(const Tensors sources, Tensors targets, const Tensor source_slots,
              const Tensor target_slots, const std::vector<int64_t> slot_dims,
              const std::optional<Tensor> report) {
  move(sources, targets, source_slots, target_slots, slot_dims, report,
       [](const RowCopy& copy) { run_tiles(copy, statecache::copy_tiles); });
}

#ifdef STATECACHE_WITH_CUDA
void* current_stream(int32_t device) {
#if STATECACHE_TORCH_NAMES_STREAMS
  return torch::stable::accelerator::getCurrentStream(device).nativeHandle();
#else
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
                  "statecache: torch names no current stream");
  return stream;
#endif
}

template <typename Copy>
auto launcher(int (*kernel)(const Copy&, void*), const Tensor& on) {
  return [kernel, &on](const Copy& copy) {
    const int error = kernel(copy, current_stream(on.get_device_index()));
    STD_TORCH_CHECK(error == 0, "statecache: launch failed: ", statecache::cuda_error_text(error));
  };
}

void store_cuda(const Tensors active, Tensor quantized, Tensor scale, Tensor report,
                const Tensor active_slots, const Tensor slots) {
  const torch::stable::accelerator::DeviceGuard guard(quantized.get_device_index());
  store(active, quantized, scale, report, active_slots, slots,
        launcher(statecache::quantize_cuda, quantized));
}

void load_cuda(const Tensor quantized, const Tensor scale, Tensors active, const Tensor slots,
               const Tensor active_slots) {
  const torch::stable::accelerator::DeviceGuard guard(quantized.get_device_index());
  load(quantized, scale, active, slots, active_slots,
       launcher(statecache::dequantize_cuda, quantized));
}

void move_cuda(const Tensors sources, Tensors targets, const Tensor source_slots,
               const Tensor target_slots, const std::vector<int64_t> slot_dims,
               const std::optional<Tensor> report) {
  const torch::stable::accelerator::DeviceGuard guard(source_slots.get_device_index());
  move(sources, targets, source_slots, target_slots, slot_dims, report,
       launcher(statecache::copy_cuda, source_slots));
}

STABLE_TORCH_LIBRARY_IMPL(statecache, CUDA, m) {
  m.impl("checkpoint_store", TORCH_BOX(&store_cuda));
  m.impl("checkpoint_load", TORCH_BOX(&load_cuda));
  m.impl("checkpoint_move", TORCH_BOX(&move_cuda));
}
#endif

STABLE_TORCH_LIBRARY(statecache, m) {
  m.def(
      "checkpoint_store(Tensor[] active, Tensor(a!) quantized, Tensor(b!) scale,"
      " Tensor(c!) report, Tensor active_slots, Tensor slots) -> ()");
  m.def(
      "checkpoint_load(Tensor quantized, Tensor scale, Tensor(a!)[] active, Tensor slots,"
      " Tensor active_slots) -> ()");
  m.def(
      "checkpoint_move(Tensor[] sources, Tensor(a!)[] targets, Tensor source_slots,"
      " Tensor target_slots, int[] slot_dims, Tensor(b!)? report) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(statecache, CPU, m) {
  m.impl("checkpoint_store", TORCH_BOX(&store_cpu));
  m.impl("checkpoint_load", TORCH_BOX(&load_cpu));
  m.impl("checkpoint_move", TORCH_BOX(&move_cpu));
}

#ifdef STATECACHE_WITH_CUDA
constexpr long kWithCuda = 1;
constexpr const char* kCudaArchitectures = STATECACHE_CUDA_ARCHITECTURES;
#else
constexpr long kWithCuda = 0;
constexpr const char* kCudaArchitectures = "";
#endif

// The instructions that the copies on this CPU use.
const char* instructions() {
  using statecache::InstructionSet;
  if (statecache::is_supported(InstructionSet::kAvx512)) return "AVX-512";
  return statecache::is_supported(InstructionSet::kAvx2) ? "AVX2" : "baseline";
}

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "_checkpoint_ops",
                                 nullptr,
                                 -1,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

}  // namespace

// Importing the module registers the operators; libtorch must be loaded already.
PyMODINIT_FUNC PyInit__checkpoint_ops() {
  PyObject* module = PyModule_Create(&module_definition);
  if (module != nullptr) {
    PyModule_AddIntConstant(module, "with_cuda", kWithCuda);
    PyModule_AddStringConstant(module, "cuda_architectures", kCudaArchitectures);
    PyModule_AddStringConstant(module, "cpu_instructions", instructions());
  }
  return module;
}

#ifndef STATECACHE_BINDINGS_INITIALISED_H_
#define STATECACHE_BINDINGS_INITIALISED_H_

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

// By itself pybind11 hands a method uninitialised memory when its object came from `__new__` alone.
// A type listed with STATECACHE_REFUSES_UNINITIALISED raises TypeError there.
template <typename T>
struct InitialisedCaster : pybind11::detail::type_caster_base<T> {
  bool load(pybind11::handle source, bool convert) {
    return this->template load_impl<InitialisedCaster>(source, convert);
  }
  void load_value(pybind11::detail::value_and_holder&& held) {
    if (!held.holder_constructed()) {
      throw pybind11::type_error(std::string(Py_TYPE(held.inst)->tp_name) +
                                 ".__init__() was not called");
    }
    pybind11::detail::type_caster_base<T>::load_value(std::move(held));
  }
};

#define STATECACHE_REFUSES_UNINITIALISED(T)        \
  namespace pybind11::detail {                     \
  template <>                                      \
  struct type_caster<T> : InitialisedCaster<T> {}; \
  }

#endif  // STATECACHE_BINDINGS_INITIALISED_H_

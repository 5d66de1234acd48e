#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "statecache/cost_model.h"
#include "statecache/state_index.h"

namespace py = pybind11;
using statecache::CostModel;
using statecache::Policy;
using statecache::StateId;
using statecache::StateIndex;

namespace {

// An integer argument of 64 bits.
struct Integer {
  int64_t value = 0;
};

int64_t to_int64(py::handle number) {
  const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(number.ptr()));
  if (!index) throw py::error_already_set();
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) {
    throw py::value_error(py::cast<std::string>(py::str(index)) + " does not fit in 64 bits");
  }
  return value;
}

}  // namespace

namespace pybind11::detail {

template <>
struct type_caster<Integer> {
  PYBIND11_TYPE_CASTER(Integer, const_name("int"));
  bool load(handle source, bool) {
    value.value = to_int64(source);
    return true;
  }
};

}  // namespace pybind11::detail

// Docstrings live in plugin/statecache/_index.pyi and in the C++ headers.
PYBIND11_MODULE(_index, m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const statecache::UnknownState& unknown) {
      py::set_error(PyExc_KeyError, unknown.what());
    }
  });

  py::class_<CostModel>(m, "CostModel")
      .def(py::init<double, double>(), py::arg("linear") = CostModel::kDefaultLinear,
           py::arg("quadratic") = CostModel::kDefaultQuadratic)
      .def_property_readonly("linear", &CostModel::linear)
      .def_property_readonly("quadratic", &CostModel::quadratic)
      .def(
          "cost",
          [](const CostModel& model, Integer from, Integer to) {
            const int64_t from_depth = from.value, to_depth = to.value;
            if (from_depth < 0 || to_depth < from_depth || to_depth > statecache::kMaxDepth) {
              throw std::invalid_argument("cost needs 0 <= from_depth <= to_depth <= 2147483647");
            }
            return model.cost(from_depth, to_depth);
          },
          py::arg("from_depth"), py::arg("to_depth"))
      .def("__repr__", [](const CostModel& model) {
        return py::str("CostModel(linear={!r}, quadratic={!r})")
            .format(model.linear(), model.quadratic());
      });

  py::class_<StateIndex>(m, "StateIndex")
      .def(py::init([](const std::string& policy, const CostModel& cost) {
             return StateIndex(statecache::parse_policy(policy), cost);
           }),
           py::arg("policy") = "gds", py::arg("cost") = CostModel())
      .def(
          "insert",
          [](StateIndex& index, Integer state, Integer depth, std::optional<Integer> parent,
             const py::iterable& children) {
            std::vector<StateId> below;
            for (const py::handle child : children) below.push_back(to_int64(child));
            index.insert(state.value, depth.value,
                         parent ? std::optional(parent->value) : std::nullopt, below);
          },
          py::arg("state"), py::arg("depth"), py::arg("parent") = py::none(),
          py::arg("children") = py::tuple())
      .def(
          "touch", [](StateIndex& index, Integer state) { index.touch(state.value); },
          py::arg("state"))
      .def(
          "pin", [](StateIndex& index, Integer state) { index.pin(state.value); }, py::arg("state"))
      .def(
          "unpin", [](StateIndex& index, Integer state) { index.unpin(state.value); },
          py::arg("state"))
      .def(
          "erase", [](StateIndex& index, Integer state) { index.erase(state.value); },
          py::arg("state"))
      .def("begin_walk", &StateIndex::begin_walk)
      .def("next_victim", &StateIndex::next_victim)
      .def(
          "evicted", [](StateIndex& index, Integer state) { index.evicted(state.value); },
          py::arg("state"))
      .def("end_walk", &StateIndex::end_walk)
      .def(
          "evict", [](StateIndex& index, Integer n) { return index.evict(n.value); }, py::arg("n"))
      .def(
          "priority",
          [](const StateIndex& index, Integer state) { return index.priority(state.value); },
          py::arg("state"))
      .def_property_readonly("watermark", &StateIndex::watermark)
      .def("check", &StateIndex::check)
      .def("__len__", &StateIndex::size)
      .def(
          "__contains__",
          [](const StateIndex& index, const py::object& state) {
            if (!py::isinstance<py::int_>(state)) return false;
            int overflow = 0;
            const int64_t id = PyLong_AsLongLongAndOverflow(state.ptr(), &overflow);
            return overflow == 0 && index.contains(id);
          },
          py::arg("state"));
}

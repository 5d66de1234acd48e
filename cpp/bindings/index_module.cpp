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
          [](const CostModel& model, int64_t from_depth, int64_t to_depth) {
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
          [](StateIndex& index, StateId state, int64_t depth, std::optional<StateId> parent,
             const std::vector<StateId>& children) {
            index.insert(state, depth, parent, children);
          },
          py::arg("state"), py::arg("depth"), py::arg("parent") = py::none(),
          py::arg("children") = py::tuple())
      .def("touch", &StateIndex::touch, py::arg("state"))
      .def("pin", &StateIndex::pin, py::arg("state"))
      .def("unpin", &StateIndex::unpin, py::arg("state"))
      .def("erase", &StateIndex::erase, py::arg("state"))
      .def("begin_walk", &StateIndex::begin_walk)
      .def("next_victim", &StateIndex::next_victim)
      .def("evicted", &StateIndex::evicted, py::arg("state"))
      .def("end_walk", &StateIndex::end_walk)
      .def("evict", &StateIndex::evict, py::arg("n"))
      .def("priority", &StateIndex::priority, py::arg("state"))
      .def_property_readonly("watermark", &StateIndex::watermark)
      .def("check", &StateIndex::check)
      .def("counters",
           [](const StateIndex& index) {
             py::dict counts;
             counts["comparisons"] = index.counters().comparisons;
             counts["repushes"] = index.counters().repushes;
             return counts;
           })
      .def("__len__", &StateIndex::size)
      .def("__contains__", &StateIndex::contains, py::arg("state"));
}

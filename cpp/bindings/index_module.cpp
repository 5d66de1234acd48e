#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "initialised.h"
#include "statecache/cost_model.h"
#include "statecache/policies.h"
#include "statecache/state_index.h"

namespace py = pybind11;
using statecache::CostModel;
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

std::vector<int64_t> to_int64s(const py::iterable& numbers) {
  std::vector<int64_t> values;
  for (const py::handle number : numbers) values.push_back(to_int64(number));
  return values;
}

}  // namespace

STATECACHE_REFUSES_UNINITIALISED(CostModel)
STATECACHE_REFUSES_UNINITIALISED(StateIndex)

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
      .def("__reduce_ex__",
           [](const py::object& self, int) {
             const auto& model = self.cast<const CostModel&>();
             return py::make_tuple(py::type::of(self),
                                   py::make_tuple(model.linear(), model.quadratic()));
           })
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

  py::tuple names(statecache::policies().size());
  for (size_t row = 0; row < names.size(); ++row) names[row] = statecache::policies()[row].name;
  m.attr("POLICIES") = names;

  py::class_<StateIndex>(m, "StateIndex")
      // By itself pybind11 ends the process in the oldest protocols.
      .def("__reduce_ex__",
           [](const StateIndex&, int) -> py::object {
             throw py::type_error("a StateIndex cannot be pickled or copied");
           })
      .def(py::init([](const std::string& policy, const CostModel& cost,
                       std::optional<Integer> slots, Integer ghosts) {
             const auto count = slots ? std::optional(slots->value) : std::nullopt;
             return statecache::make_index(policy, {cost, count, ghosts.value});
           }),
           py::arg("policy") = "gds", py::arg("cost") = CostModel(), py::arg("slots") = py::none(),
           py::arg("ghosts") = 4096)
      .def(
          "on_prompt",
          [](StateIndex& index, const py::iterable& points, const py::iterable& depths,
             Integer resumable, const py::iterable& admitted) {
            if (!index.needs_prompts()) return;  // the rest takes as long as the prompt
            index.on_prompt(to_int64s(points), to_int64s(depths), resumable.value,
                            to_int64s(admitted));
          },
          py::arg("points"), py::arg("depths"), py::arg("resumable"), py::arg("admitted"))
      .def(
          "insert",
          [](StateIndex& index, Integer state, Integer depth, std::optional<Integer> parent,
             const py::iterable& children, bool end) {
            const std::vector<StateId> below = to_int64s(children);
            index.insert(state.value, depth.value,
                         parent ? std::optional(parent->value) : std::nullopt, below, end);
          },
          py::arg("state"), py::arg("depth"), py::arg("parent") = py::none(),
          py::arg("children") = py::tuple(), py::kw_only(), py::arg("end") = false)
      .def(
          "touch",
          [](StateIndex& index, Integer state, bool end) { index.touch(state.value, end); },
          py::arg("state"), py::kw_only(), py::arg("end") = false)
      .def(
          "pin", [](StateIndex& index, Integer state) { index.pin(state.value); }, py::arg("state"))
      .def(
          "unpin", [](StateIndex& index, Integer state) { index.unpin(state.value); },
          py::arg("state"))
      .def(
          "erase", [](StateIndex& index, Integer state) { index.erase(state.value); },
          py::arg("state"))
      .def(
          "drop",
          [](StateIndex& index, const py::iterable& points) { index.drop(to_int64s(points)); },
          py::arg("points"))
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
      .def(
          "rank", [](const StateIndex& index, Integer state) { return index.rank(state.value); },
          py::arg("state"))
      .def_property_readonly("policy", &StateIndex::policy)
      .def_property_readonly("needs_prompts", &StateIndex::needs_prompts)
      .def_property_readonly("order", &StateIndex::order)
      .def_property_readonly("ghosts", &StateIndex::ghosts)
      .def_property_readonly("points", &StateIndex::points)
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

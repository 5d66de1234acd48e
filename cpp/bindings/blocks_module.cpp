#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <structmember.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "statecache/block_queue.h"
#include "statecache/gds_queue.h"
#include "statecache/reuse_queue.h"
#include "statecache/state_index.h"

namespace py = pybind11;
using statecache::Block;
using statecache::BlockQueue;
using statecache::CachedBlock;
using statecache::GdsQueue;
using statecache::ReuseQueue;
using statecache::StockQueue;

namespace {

// Reads one attribute of many objects of a type: straight from the slot if it has one.
class Attribute {
 public:
  Attribute(py::handle type, const std::string& name)
      : type_(reinterpret_cast<PyTypeObject*>(type.ptr())),
        name_(py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name.c_str()))) {
    const py::object found = py::getattr(type, name_, py::none());
    if (!Py_IS_TYPE(found.ptr(), &PyMemberDescr_Type)) return;
    const PyMemberDef* const member = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member;
    if (member->type == T_OBJECT_EX) offset_ = member->offset;
  }
  py::object operator()(PyObject* object) const {
    if (offset_ > 0 && Py_IS_TYPE(object, type_)) {
      PyObject* const value =
          *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
      if (value != nullptr) return py::reinterpret_borrow<py::object>(value);
    }
    PyObject* const value = PyObject_GetAttr(object, name_.ptr());
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }

 private:
  PyTypeObject* type_;  // of blocks that the pool keeps alive
  py::str name_;
  Py_ssize_t offset_ = 0;
};

// The items of anything that can be iterated, without a copy where it is a list or a tuple.
class Items {
 public:
  explicit Items(py::handle source)
      : held_(py::reinterpret_steal<py::object>(PySequence_Fast(source.ptr(), "not iterable"))) {
    if (!held_) throw py::error_already_set();
  }
  size_t size() const { return static_cast<size_t>(PySequence_Fast_GET_SIZE(held_.ptr())); }
  PyObject* operator[](size_t at) const {
    return PySequence_Fast_GET_ITEM(held_.ptr(), static_cast<Py_ssize_t>(at));
  }

 private:
  py::object held_;
};

std::string_view bytes_of(PyObject* key) {
  char* data = nullptr;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(key, &data, &length) != 0) throw py::error_already_set();
  return {data, static_cast<size_t>(length)};
}

// The blocks of a pool as Python objects, and the dict of those that are cached: under each key
// one block, or a dict of several by number.
class Pool final : public statecache::BlockCache {
 public:
  Pool(const py::list& blocks, py::dict cached, const std::string& hash_name)
      : blocks(blocks),
        cached(std::move(cached)),
        hash_(type_of(this->blocks), hash_name),
        id_(type_of(this->blocks), "block_id") {}

  size_t size() const { return blocks.size(); }
  PyObject* operator[](Block block) const {
    return PyTuple_GET_ITEM(blocks.ptr(), static_cast<Py_ssize_t>(block));
  }
  Block number(PyObject* block) const {
    const py::object id = id_(block);
    const size_t number = PyLong_AsSize_t(id.ptr());
    if (number == SIZE_MAX && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (number >= size() || (*this)[static_cast<Block>(number)] != block) {
      throw py::value_error("a block of another pool");
    }
    return static_cast<Block>(number);
  }
  std::vector<Block> numbers(const Items& items) const {
    std::vector<Block> found(items.size());
    for (size_t at = 0; at < found.size(); ++at) found[at] = number(items[at]);
    return found;
  }
  py::list objects(const std::vector<Block>& numbers) const {
    py::list made(numbers.size());
    for (size_t at = 0; at < numbers.size(); ++at) {
      PyObject* const block = (*this)[numbers[at]];
      PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(at), Py_NewRef(block));
    }
    return made;
  }
  py::object key(Block block) const { return hash_((*this)[block]); }

  void look_up(std::span<const Block> numbers, std::span<CachedBlock> seen, bool first) override {
    // Each block, its key and its entry are cache misses: fetch them side by side.
    for (const Block number : numbers) __builtin_prefetch((*this)[number]);
    keys_.clear();
    for (const Block number : numbers) {
      keys_.push_back(key(number));
      __builtin_prefetch(keys_.back().ptr());
    }
    for (size_t at = 0; at < numbers.size(); ++at) look_up(numbers[at], keys_[at], seen[at], first);
  }

  py::tuple blocks;  // a copy: whatever becomes of the list, no block that is queued goes away
  py::dict cached, apart;

 private:
  static py::object type_of(const py::tuple& blocks) {
    if (blocks.empty()) throw py::value_error("a pool without blocks");
    return py::type::of(blocks[0]);
  }

  void look_up(Block number, const py::object& held, CachedBlock& seen, bool first) const {
    if (held.is_none()) return;
    seen.key = bytes_of(held.ptr());
    if (PyDict_Size(apart.ptr()) > 0) seen.apart = apart.contains(held);
    PyObject* const found = PyDict_GetItemWithError(cached.ptr(), held.ptr());
    if (found == nullptr) {
      if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    } else if (found == (*this)[number]) {
      seen.copies = 1;
      seen.first = number;
    } else if (PyDict_Check(found)) {
      seen.copies = static_cast<uint32_t>(PyDict_Size(found));
      Py_ssize_t at = 0;
      PyObject *id = nullptr, *block = nullptr;
      if (first && PyDict_Next(found, &at, &id, &block) != 0) seen.first = this->number(block);
    }
  }

  Attribute hash_, id_;
  std::vector<py::object> keys_;  // of one call
};

// A queue with the methods that an engine calls with its own blocks.
struct Queue {
  Queue(py::list blocks, py::dict cached, const std::string& hash_name)
      : pool(std::move(blocks), std::move(cached), hash_name) {}
  virtual ~Queue() = default;
  virtual BlockQueue& order() = 0;
  // The queue is done with the call: what a listener raises is reported and cannot undo it.
  static void tell(const py::object& listener, const py::object& what) {
    const auto answer =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(listener.ptr(), what.ptr()));
    if (!answer) PyErr_WriteUnraisable(listener.ptr());
  }

  std::vector<Block> take(size_t n) {
    order().require_free_blocks(n);
    std::vector<Block> taken(n);
    std::vector<Block> last;  // of this call only: a listener may take blocks, too
    order().take(taken, lost.is_none() ? nullptr : &last);
    if (!last.empty()) {
      const py::object listener = lost;  // which may put another one in its place
      for (const Block block : last) tell(listener, pool.key(block));
    }
    return taken;
  }

  Pool pool;
  py::object lost = py::none();
};

struct Stock final : Queue {
  Stock(py::list blocks, py::dict cached, const std::string& hash_name)
      : Queue(std::move(blocks), std::move(cached), hash_name), queue(pool.size(), pool) {}
  BlockQueue& order() override { return queue; }
  StockQueue queue;
};

struct Reuse final : Queue {
  Reuse(py::list blocks, py::dict cached, const std::string& hash_name, std::string ending)
      : Queue(std::move(blocks), std::move(cached), hash_name),
        queue(pool.size(), pool, std::move(ending)) {}
  BlockQueue& order() override { return queue; }
  ReuseQueue queue;
};

struct Gds final : Queue {
  Gds(py::list blocks, py::dict cached, const std::string& hash_name, py::object index,
      std::vector<std::string> endings)
      : Queue(std::move(blocks), std::move(cached), hash_name),
        index(std::move(index)),
        queue(pool.size(), pool, this->index.cast<statecache::StateIndex&>(), std::move(endings)) {}
  BlockQueue& order() override { return queue; }
  py::object index;
  GdsQueue queue;
};

// A pool and its queue refer to each other: the garbage collector has to see it.
void collect(PyHeapTypeObject* heap_type) {
  PyTypeObject* const type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    const auto& queue = py::cast<Queue&>(py::handle(self));
    Py_VISIT(queue.pool.blocks.ptr());
    Py_VISIT(queue.pool.cached.ptr());
    Py_VISIT(queue.pool.apart.ptr());
    Py_VISIT(queue.lost.ptr());
    return 0;
  };
  type->tp_clear = [](PyObject* self) {
    if (!py::detail::is_holder_constructed(self)) return 0;
    auto& queue = py::cast<Queue&>(py::handle(self));
    queue.lost = py::none();
    queue.pool.apart = py::dict();
    queue.pool.cached = py::dict();
    return 0;
  };
}

py::object iterator_over(const py::list& blocks) {
  return py::reinterpret_steal<py::object>(PyObject_GetIter(blocks.ptr()));
}

}  // namespace

// Docstrings live in plugin/statecache/_blocks.pyi and in the C++ headers.
PYBIND11_MODULE(_blocks, m) {
  py::module_::import("statecache._index");

  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const std::out_of_range& absent) {
      py::set_error(PyExc_KeyError, absent.what());
    }
  });

  py::class_<Queue>(m, "BlockQueue", py::custom_type_setup(collect))
      .def_property_readonly("num_free_blocks",
                             [](Queue& self) { return self.order().free_blocks(); })
      .def_readwrite("lost", &Queue::lost)
      .def_property_readonly("apart", [](Queue& self) { return self.pool.apart; })
      .def(
          "popleft_n", [](Queue& self, size_t n) { return self.pool.objects(self.take(n)); },
          py::arg("n"))
      .def("popleft",
           [](Queue& self) {
             if (self.order().free_blocks() == 0) throw py::value_error("no free blocks");
             return py::reinterpret_borrow<py::object>(self.pool[self.take(1)[0]]);
           })
      .def(
          "append_n",
          [](Queue& self, const py::object& blocks) {
            self.order().append(self.pool.numbers(Items(blocks)));
          },
          py::arg("blocks"))
      .def(
          "append",
          [](Queue& self, const py::object& block) {
            const Block number = self.pool.number(block.ptr());
            self.order().append({&number, 1});
          },
          py::arg("block"))
      .def(
          "prepend_n",
          [](Queue& self, const py::object& blocks) {
            self.order().prepend(self.pool.numbers(Items(blocks)));
          },
          py::arg("blocks"))
      .def(
          "remove",
          [](Queue& self, const py::object& block) {
            self.order().remove(self.pool.number(block.ptr()));
          },
          py::arg("block"))
      .def(
          "unhashed",
          [](Queue& self, const py::object& block) {
            self.order().unhashed(self.pool.number(block.ptr()));
          },
          py::arg("block"))
      .def(
          "reset",
          [](Queue& self, py::dict cached) {
            self.pool.cached = std::move(cached);
            self.order().reset();
          },
          py::arg("cached"))
      .def("get_all_free_blocks",
           [](Queue& self) { return self.pool.objects(self.order().in_order()); })
      .def(
          "iter_blocks_after",
          [](Queue& self, const py::object& cursor) {
            Block after = statecache::kNoBlock;
            if (!cursor.is_none()) {
              after = self.pool.number(cursor.ptr());
              // As an engine's own list would: nothing comes after a block that is in use.
              if (!self.order().is_free(after)) return iterator_over(py::list());
            }
            return iterator_over(self.pool.objects(self.order().in_order(after)));
          },
          py::arg("cursor"));

  py::class_<Stock, Queue>(m, "StockQueue")
      .def(py::init<py::list, py::dict, const std::string&>(), py::arg("blocks"), py::arg("cached"),
           py::arg("hash_name"));

  py::class_<Reuse, Queue>(m, "ReuseQueue")
      .def(py::init<py::list, py::dict, const std::string&, std::string>(), py::arg("blocks"),
           py::arg("cached"), py::arg("hash_name"), py::arg("ending"))
      .def_property(
          "fresh_is_proven", [](const Reuse& self) { return self.queue.fresh_is_proven(); },
          [](Reuse& self, bool proven) { self.queue.set_fresh_is_proven(proven); })
      .def_property_readonly("ratio", [](const Reuse& self) { return self.queue.ratio(); })
      .def_property_readonly("watches", [](const Reuse& self) { return self.queue.watches(); })
      .def(
          "looked_up",
          [](Reuse& self, const py::object& missing) {
            const Items items(missing);
            std::vector<std::string_view> keys(items.size());
            for (size_t at = 0; at < keys.size(); ++at) keys[at] = bytes_of(items[at]);
            self.queue.looked_up(keys);
          },
          py::arg("missing"))
      .def(
          "mark_proven",
          [](Reuse& self, const py::object& blocks) {
            for (const Block block : self.pool.numbers(Items(blocks))) {
              self.queue.mark_proven(block);
            }
          },
          py::arg("blocks"));

  py::class_<Gds, Queue>(m, "GdsQueue")
      .def(py::init<py::list, py::dict, const std::string&, py::object, std::vector<std::string>>(),
           py::arg("blocks"), py::arg("cached"), py::arg("hash_name"), py::arg("index"),
           py::arg("endings"))
      .def("take_gone", [](Gds& self) { return self.queue.take_gone(); })
      .def(
          "committed",
          [](Gds& self, statecache::StateId state, const py::bytes& name) {
            self.queue.committed(state, bytes_of(name.ptr()));
          },
          py::arg("state"), py::arg("name"));
}

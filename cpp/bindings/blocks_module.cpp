#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "block_hash_index.h"
#include "initialised.h"
#include "statecache/block_queue.h"
#include "statecache/reuse_queue.h"

namespace py = pybind11;
using statecache::Block;
using statecache::BlockHashIndex;
using statecache::BlockQueue;
using statecache::FifoQueue;
using statecache::ReuseQueue;

namespace {

// The items of anything that can be iterated. What a block does when it is asked may change a list,
// so they are held in a tuple.
class Items {
 public:
  explicit Items(py::handle source)
      : held_(py::reinterpret_steal<py::object>(PySequence_Tuple(source.ptr()))) {
    if (!held_) throw py::error_already_set();
  }
  size_t size() const { return static_cast<size_t>(PyTuple_GET_SIZE(held_.ptr())); }
  PyObject* operator[](size_t at) const {
    return PyTuple_GET_ITEM(held_.ptr(), static_cast<Py_ssize_t>(at));
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

PyTypeObject* block_hash_index_type = nullptr;

// What blocks hold, as the module's own type, kept alive.
class Pool {
 public:
  explicit Pool(py::object cached) : cached_(std::move(cached)) {
    if (!Py_IS_TYPE(cached_.ptr(), block_hash_index_type)) {
      throw py::type_error("a queue needs BlockHashIndex");
    }
  }

  const BlockHashIndex& cache() const { return *pool().cache; }
  PyObject* object(Block block) const {
    PyObject* const found = pool().block(block);
    if (found == nullptr) throw py::error_already_set();
    return found;
  }
  Block number(PyObject* block) const {
    const Block number = pool().number(block);
    if (number == statecache::kNoBlock) throw py::error_already_set();
    return number;
  }
  std::vector<Block> numbers(const Items& items) const {
    std::vector<Block> found(items.size());
    for (size_t at = 0; at < found.size(); ++at) pool().prefetch(items[at]);
    for (size_t at = 0; at < found.size(); ++at) found[at] = number(items[at]);
    return found;
  }
  // The numbers of blocks that no request uses and of those that one does; a null block is neither.
  std::array<std::vector<Block>, 2> by_use(const Items& items) const {
    std::array<std::vector<Block>, 2> found;
    for (size_t at = 0; at < items.size(); ++at) pool().prefetch(items[at]);
    for (size_t at = 0; at < items.size(); ++at) {
      const int null = pool().is_null(items[at]);
      Py_ssize_t uses = 0;
      if (null < 0 || !pool().read_uses(items[at], uses)) throw py::error_already_set();
      if (null == 0) found[uses != 0].push_back(number(items[at]));
    }
    return found;
  }
  void add_use(PyObject* block) const {
    if (!pool().add_uses(block, 1)) throw py::error_already_set();
  }
  // Takes back what add_use() has done, as far as the block lets it.
  void drop_use(PyObject* block) const {
    if (!pool().add_uses(block, -1)) PyErr_WriteUnraisable(block);
  }
  py::list objects(const std::vector<Block>& numbers) const {
    py::list found(numbers.size());
    for (size_t at = 0; at < numbers.size(); ++at) {
      PyList_SET_ITEM(found.ptr(), static_cast<Py_ssize_t>(at), Py_NewRef(object(numbers[at])));
    }
    return found;
  }
  py::bytes key(Block block) const { return py::bytes(cache().key(cache().number_of(block))); }
  PyObject* visited() const { return cached_.ptr(); }

 private:
  const PoolBlocks& pool() const { return *reinterpret_cast<PoolBlocks*>(cached_.ptr()); }

  py::object cached_;
};

// A queue with the methods that an engine calls with its own blocks.
struct Queue {
  explicit Queue(py::object cached) : pool(std::move(cached)) {}
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
      std::vector<py::bytes> keys;       // and change what is cached
      for (const Block block : last) keys.push_back(pool.key(block));
      for (const py::bytes& key : keys) tell(listener, key);
    }
    return taken;
  }

  void touch(const Items& blocks) {
    const auto [free, used] = pool.by_use(blocks);
    size_t counted = 0;
    try {
      for (; counted < blocks.size(); ++counted) pool.add_use(blocks[counted]);
      order().remove(free);
    } catch (...) {
      while (counted > 0) pool.drop_use(blocks[--counted]);
      throw;
    }
    hit_in_use(used);
  }
  virtual void hit_in_use(const std::vector<Block>&) {}

  Pool pool;
  py::object lost = py::none();
};

struct Fifo final : Queue {
  explicit Fifo(py::object cached) : Queue(std::move(cached)), queue(pool.cache()) {}
  BlockQueue& order() override { return queue; }
  FifoQueue queue;
};

struct Reuse final : Queue {
  Reuse(py::object cached, std::string ending)
      : Queue(std::move(cached)), queue(pool.cache(), std::move(ending)) {}
  BlockQueue& order() override { return queue; }
  void hit_in_use(const std::vector<Block>& blocks) override {
    for (const Block block : blocks) queue.mark_protected(block);
  }
  ReuseQueue queue;
};

}  // namespace

STATECACHE_REFUSES_UNINITIALISED(Queue)
STATECACHE_REFUSES_UNINITIALISED(Fifo)
STATECACHE_REFUSES_UNINITIALISED(Reuse)

namespace {

// A pool and its queue refer to each other: the garbage collector has to see it.
void collect(PyHeapTypeObject* heap_type) {
  PyTypeObject* const type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    const auto& queue = py::cast<Queue&>(py::handle(self));
    Py_VISIT(queue.pool.visited());
    Py_VISIT(queue.lost.ptr());
    return 0;
  };
  type->tp_clear = [](PyObject* self) {
    if (!py::detail::is_holder_constructed(self)) return 0;
    auto& queue = py::cast<Queue&>(py::handle(self));
    queue.lost = py::none();
    return 0;
  };
}

py::object iterator_over(const py::list& blocks) {
  return py::reinterpret_steal<py::object>(PyObject_GetIter(blocks.ptr()));
}

}  // namespace

// Docstrings live in plugin/statecache/_blocks.pyi and in the C++ headers.
PYBIND11_MODULE(_blocks, m) {
  block_hash_index_type = add_block_hash_index(m.ptr());

  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const std::out_of_range& absent) {
      py::set_error(PyExc_KeyError, absent.what());
    }
  });

  py::class_<Queue> queue(m, "BlockQueue", py::custom_type_setup(collect));
  queue
      .def_property_readonly("num_free_blocks",
                             [](Queue& self) { return self.order().free_blocks(); })
      .def_readwrite("lost", &Queue::lost)
      // By itself pybind11 ends the process in the oldest protocols.
      .def("__reduce_ex__",
           [](const Queue&, int) -> py::object {
             throw py::type_error("a queue of blocks cannot be pickled or copied");
           })
      .def(
          "popleft_n", [](Queue& self, size_t n) { return self.pool.objects(self.take(n)); },
          py::arg("n"))
      .def("popleft",
           [](Queue& self) {
             if (self.order().free_blocks() == 0) throw py::value_error("no free blocks");
             return py::reinterpret_borrow<py::object>(self.pool.object(self.take(1)[0]));
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
          "touch", [](Queue& self, const py::object& blocks) { self.touch(Items(blocks)); },
          py::arg("blocks"))
      .def(
          "hit_in_use",
          [](Queue& self, const py::object& blocks) {
            std::vector<Block> used;
            const Items items(blocks);
            for (size_t at = 0; at < items.size(); ++at)
              used.push_back(self.pool.number(items[at]));
            self.hit_in_use(used);
          },
          py::arg("blocks"))
      .def(
          "remove",
          [](Queue& self, const py::object& block) {
            const Block number = self.pool.number(block.ptr());
            self.order().remove({&number, 1});
          },
          py::arg("block"))
      .def(
          "unhashed",
          [](Queue& self, const py::object& block) {
            self.order().unhashed(self.pool.number(block.ptr()));
          },
          py::arg("block"))
      .def("reset", [](Queue& self) { self.order().reset(); })
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

  py::class_<Fifo, Queue>(m, "FifoQueue").def(py::init<py::object>(), py::arg("cached"));

  py::class_<Reuse, Queue>(m, "ReuseQueue")
      .def(py::init<py::object, std::string>(), py::arg("cached"), py::arg("ending"))
      .def_property(
          "start_protected", [](const Reuse& self) { return self.queue.start_protected(); },
          [](Reuse& self, bool start) { self.queue.set_start_protected(start); })
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
          py::arg("missing"));
}

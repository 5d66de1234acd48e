#include "block_hash_index.h"

#include <structmember.h>

#include <exception>
#include <new>
#include <string_view>
#include <utility>

using statecache::Block;
using statecache::BlockHashIndex;
using statecache::kNoBlock;

namespace {

PoolBlocks& pool_of(PyObject* self) { return *reinterpret_cast<PoolBlocks*>(self); }

// Runs `call`; an exception of C++ becomes one of Python, and the result `failed`.
template <typename Result, typename Call>
Result guarded(Result failed, const Call& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return failed;
}

// Whether `key` could be read; sets an exception if not. Bytes know their hash.
bool read_key(PyObject* key, BlockHashIndex::Key& read) {
  char* data = nullptr;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(key, &data, &length) != 0) return false;
  const Py_hash_t hash = PyObject_Hash(key);
  if (hash == -1) return false;
  read = {{data, static_cast<size_t>(length)}, static_cast<uint64_t>(hash)};
  return true;
}

// kNoBlock for a number that no block can have, with an exception set if it is none at all.
Block read_number(PyObject* number) {
  const size_t read = PyLong_AsSize_t(number);
  if (read == SIZE_MAX && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) PyErr_Clear();
    return kNoBlock;
  }
  return read < kNoBlock ? static_cast<Block>(read) : kNoBlock;
}

bool has_arguments(const char* name, Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, not %zd", name, wanted, given);
  return false;
}

PyObject* get_one_block(PyObject* self, PyObject* given) {
  BlockHashIndex::Key key{};
  if (!read_key(given, key)) return nullptr;
  const PoolBlocks& pool = pool_of(self);
  const BlockHashIndex::Number number = pool.cache->find(key);
  const Block first = number == BlockHashIndex::kNone ? kNoBlock : pool.cache->first(number);
  if (first == kNoBlock) Py_RETURN_NONE;
  return Py_XNewRef(pool.block(first));
}

PyObject* contain(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  BlockHashIndex::Key key{};
  if (!has_arguments("contain", count, 2) || !read_key(given[0], key)) return nullptr;
  const Block block = read_number(given[1]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyBool_FromLong(pool_of(self).cache->contains(key, block));
}

PyObject* insert(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  BlockHashIndex::Key key{};
  if (!has_arguments("insert", count, 2) || !read_key(given[0], key)) return nullptr;
  const Block block = pool_of(self).number(given[1]);
  if (block == kNoBlock) return nullptr;
  return guarded<PyObject*>(nullptr, [&] {
    pool_of(self).cache->insert(key, block);
    return Py_NewRef(Py_None);
  });
}

PyObject* pop(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  BlockHashIndex::Key key{};
  if (!has_arguments("pop", count, 2) || !read_key(given[0], key)) return nullptr;
  const Block block = read_number(given[1]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return guarded<PyObject*>(nullptr, [&] {
    PoolBlocks& pool = pool_of(self);
    return pool.cache->erase(key, block) ? Py_XNewRef(pool.block(block)) : Py_NewRef(Py_None);
  });
}

PyObject* set_has_checkpoint(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  BlockHashIndex::Key key{};
  if (!has_arguments("set_has_checkpoint", count, 2) || !read_key(given[0], key)) return nullptr;
  const int wanted = PyObject_IsTrue(given[1]);
  if (wanted < 0) return nullptr;
  return guarded<PyObject*>(nullptr, [&] {
    pool_of(self).cache->set_has_checkpoint(key, wanted == 1);
    return Py_NewRef(Py_None);
  });
}

PyObject* has_checkpoint(PyObject* self, PyObject* given) {
  BlockHashIndex::Key key{};
  if (!read_key(given, key)) return nullptr;
  const BlockHashIndex& cache = *pool_of(self).cache;
  const BlockHashIndex::Number number = cache.find(key);
  return PyBool_FromLong(number != BlockHashIndex::kNone && cache.has_checkpoint(number));
}

PyObject* clear_checkpoints(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr, [&] {
    pool_of(self).cache->clear_checkpoints();
    return Py_NewRef(Py_None);
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr, [&] {
    pool_of(self).cache->clear();
    return Py_NewRef(Py_None);
  });
}

Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(pool_of(self).cache->size()); }

int contains_key(PyObject* self, PyObject* given) {
  BlockHashIndex::Key key{};
  if (!read_key(given, key)) return -1;
  const BlockHashIndex& cache = *pool_of(self).cache;
  const BlockHashIndex::Number number = cache.find(key);
  return number != BlockHashIndex::kNone && cache.copies(number) > 0;
}

// Where objects of a type keep an attribute: in a slot of its own, if it has one; 0 if not.
Py_ssize_t slot_of(PyTypeObject* type, const char* name) {
  PyObject* const found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
  if (found == nullptr) {
    PyErr_Clear();
    return 0;
  }
  Py_ssize_t at = 0;
  if (Py_IS_TYPE(found, &PyMemberDescr_Type) && PyType_IsSubtype(type, PyDescr_TYPE(found))) {
    const PyMemberDef* const member = reinterpret_cast<PyMemberDescrObject*>(found)->d_member;
    if (member->type == T_OBJECT_EX) at = member->offset;
  }
  Py_DECREF(found);
  return at;
}

PyObject*& slot(PyObject* block, Py_ssize_t at) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(block) + at);
}

PyObject* make(PyTypeObject* type, PyObject* given, PyObject* named) {
  PyObject* blocks = nullptr;
  const char* names[] = {"blocks", nullptr};
  if (!PyArg_ParseTupleAndKeywords(given, named, "O", const_cast<char**>(names), &blocks)) {
    return nullptr;
  }
  PyObject* const held = PySequence_Tuple(blocks);
  if (held == nullptr) return nullptr;
  if (PyTuple_GET_SIZE(held) == 0) {
    Py_DECREF(held);
    PyErr_SetString(PyExc_ValueError, "a pool without blocks");
    return nullptr;
  }
  PyObject* const self = type->tp_alloc(type, 0);  // all zeros
  if (self == nullptr) {
    Py_DECREF(held);
    return nullptr;
  }
  PoolBlocks& pool = pool_of(self);
  pool.blocks = held;
  pool.cache = guarded<BlockHashIndex*>(nullptr, [&] { return new BlockHashIndex(pool.size()); });
  if (pool.cache == nullptr) {
    Py_DECREF(self);
    return nullptr;
  }
  pool.type = Py_TYPE(PyTuple_GET_ITEM(held, 0));
  pool.id_at = slot_of(pool.type, "block_id");
  pool.uses_at = slot_of(pool.type, "ref_cnt");
  pool.null_at = slot_of(pool.type, "is_null");
  return self;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(pool_of(self).blocks);
  return 0;
}

int let_go(PyObject* self) {
  PoolBlocks& pool = pool_of(self);
  pool.id_at = pool.uses_at = pool.null_at = 0;  // the type may go away, too
  Py_XDECREF(std::exchange(pool.blocks, PyTuple_New(0)));
  return 0;
}

void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Py_XDECREF(pool_of(self).blocks);
  delete pool_of(self).cache;
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Function>
PyCFunction fast(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kMethods[] = {
    {"get_one_block", get_one_block, METH_O, nullptr},
    {"contain", fast(contain), METH_FASTCALL, nullptr},
    {"insert", fast(insert), METH_FASTCALL, nullptr},
    {"pop", fast(pop), METH_FASTCALL, nullptr},
    {"set_has_checkpoint", fast(set_has_checkpoint), METH_FASTCALL, nullptr},
    {"has_checkpoint", has_checkpoint, METH_O, nullptr},
    {"clear_checkpoints", clear_checkpoints, METH_NOARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(let_go)},
    {Py_tp_methods, kMethods},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_sq_contains, reinterpret_cast<void*>(contains_key)},
    {0, nullptr},
};

PyType_Spec kSpec = {"statecache._blocks.BlockHashIndex", sizeof(PoolBlocks), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};

}  // namespace

PyObject* PoolBlocks::block(Block number) const {
  if (number < size()) return PyTuple_GET_ITEM(blocks, static_cast<Py_ssize_t>(number));
  PyErr_SetString(PyExc_RuntimeError, "the pool is gone");
  return nullptr;
}

PyObject* PoolBlocks::attribute(PyObject* block, Py_ssize_t at, const char* name) const {
  PyObject* found = nullptr;
  if (at > 0 && Py_IS_TYPE(block, type)) found = Py_XNewRef(slot(block, at));
  return found != nullptr ? found : PyObject_GetAttrString(block, name);
}

bool PoolBlocks::read_uses(PyObject* block, Py_ssize_t& uses) const {
  PyObject* const found = attribute(block, uses_at, "ref_cnt");
  if (found == nullptr) return false;
  uses = PyLong_AsSsize_t(found);
  Py_DECREF(found);
  return uses != -1 || PyErr_Occurred() == nullptr;
}

bool PoolBlocks::add_uses(PyObject* block, Py_ssize_t more) const {
  Py_ssize_t uses = 0;
  if (!read_uses(block, uses)) return false;
  if (__builtin_add_overflow(uses, more, &uses)) {
    PyErr_SetString(PyExc_OverflowError, "too many uses of a block");
    return false;
  }
  PyObject* const after = PyLong_FromSsize_t(uses);
  if (after == nullptr) return false;
  if (uses_at > 0 && Py_IS_TYPE(block, type)) {
    PyObject* const before = std::exchange(slot(block, uses_at), after);
    Py_XDECREF(before);
    return true;
  }
  const int failed = PyObject_SetAttrString(block, "ref_cnt", after);
  Py_DECREF(after);
  return failed == 0;
}

int PoolBlocks::is_null(PyObject* block) const {
  PyObject* const found = attribute(block, null_at, "is_null");
  if (found == nullptr) return -1;
  const int null = PyObject_IsTrue(found);
  Py_DECREF(found);
  return null;
}

Block PoolBlocks::number(PyObject* block) const {
  PyObject* const id = attribute(block, id_at, "block_id");
  if (id == nullptr) return kNoBlock;
  const Block number = read_number(id);
  Py_DECREF(id);
  if (number < size() && PyTuple_GET_ITEM(blocks, static_cast<Py_ssize_t>(number)) == block) {
    return number;
  }
  if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_ValueError, "a block of another pool");
  return kNoBlock;
}

PyTypeObject* add_block_hash_index(PyObject* module) {
  PyObject* const type = PyType_FromModuleAndSpec(module, &kSpec, nullptr);
  if (type == nullptr) throw pybind11::error_already_set();
  if (PyModule_AddObjectRef(module, "BlockHashIndex", type) != 0) {
    Py_DECREF(type);
    throw pybind11::error_already_set();
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

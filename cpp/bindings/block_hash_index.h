#ifndef STATECACHE_BINDINGS_BLOCK_HASH_INDEX_H_
#define STATECACHE_BINDINGS_BLOCK_HASH_INDEX_H_

#include <Python.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "statecache/block_hash_index.h"

// The blocks of a pool as Python objects, and what they hold. A type of plain C, since an engine
// calls it for each block it looks up, and an argument parser would take longer than the look-up.
struct PoolBlocks {
  PyObject_HEAD;
  PyObject* blocks;    // a tuple: whatever becomes of the list, no block that is queued goes away
  PyTypeObject* type;  // of the blocks, and where in them their attributes are; 0: by name
  Py_ssize_t id_at, uses_at, null_at;
  statecache::BlockHashIndex* cache;

  size_t size() const { return static_cast<size_t>(PyTuple_GET_SIZE(blocks)); }
  // Borrowed; nullptr with an exception set once the garbage collector has cleared the pool.
  PyObject* block(statecache::Block number) const;
  // Loads what number() will read of a block.
  void prefetch(PyObject* block) const {
    if (id_at == 0 || !Py_IS_TYPE(block, type)) return;
    __builtin_prefetch(*reinterpret_cast<PyObject**>(reinterpret_cast<char*>(block) + id_at));
  }
  // kNoBlock with an exception set for what is no block of this pool.
  statecache::Block number(PyObject* block) const;
  // How many requests use a block, its `ref_cnt`. Returns whether it could be read; sets an
  // exception if not.
  bool read_uses(PyObject* block, Py_ssize_t& uses) const;
  // Whether `more` could be added; sets an exception if not.
  bool add_uses(PyObject* block, Py_ssize_t more) const;
  // Whether `block` stands for none; -1 with an exception set if that cannot be read.
  int is_null(PyObject* block) const;

 private:
  // A new reference; nullptr with an exception set.
  PyObject* attribute(PyObject* block, Py_ssize_t at, const char* name) const;
};

// Returns the type, made once; adds it to the module.
PyTypeObject* add_block_hash_index(PyObject* module);

#endif  // STATECACHE_BINDINGS_BLOCK_HASH_INDEX_H_

#ifndef STATECACHE_BINDINGS_CHECKPOINT_ARGUMENTS_H_
#define STATECACHE_BINDINGS_CHECKPOINT_ARGUMENTS_H_

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "statecache/checkpoint_copy.h"

namespace statecache {

// The tensors that the copies are called with: what does not fit is refused, the rest is described
// by addresses and strides.

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

inline int64_t bytes_of(const Tensor& tensor, int64_t elements) {
  return elements * static_cast<int64_t>(tensor.element_size());
}

inline std::byte* address(const Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

inline bool on_one_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

// Layers of one kind of state: one tensor with a layer dimension, or a tensor for each layer.
class Layers {
 public:
  Layers(const Tensors& tensors, bool stacked) : tensors_(tensors), stacked_(stacked) {
    STD_TORCH_CHECK(!stacked || tensors.size() == 1, "statecache: one stacked tensor was expected");
    for (const Tensor& tensor : tensors) {
      STD_TORCH_CHECK(tensor.dim() == first().dim() &&
                          tensor.scalar_type() == first().scalar_type() &&
                          on_one_device(tensor, first()),
                      "statecache: layers differ in shape, type or device");
      for (int64_t d = 0; d < tensor.dim(); ++d) {
        STD_TORCH_CHECK(tensor.size(d) == first().size(d) && tensor.stride(d) == first().stride(d),
                        "statecache: layers differ in shape or strides");
      }
    }
  }

  const Tensor& first() const { return tensors_.front(); }
  int64_t count() const {
    return stacked_ ? first().size(0) : static_cast<int64_t>(tensors_.size());
  }
  std::byte* layer(int64_t index) const {
    if (!stacked_) return address(tensors_[static_cast<size_t>(index)]);
    return address(first()) + bytes_of(first(), index * first().stride(0));
  }
  // Of dimension `d` counted from the slot dimension.
  int64_t size(int64_t d) const { return first().size(d + (stacked_ ? 1 : 0)); }
  int64_t stride(int64_t d) const { return first().stride(d + (stacked_ ? 1 : 0)); }
  int64_t stride_bytes(int64_t d) const { return bytes_of(first(), stride(d)); }
  int64_t dim() const { return first().dim() - (stacked_ ? 1 : 0); }

 private:
  const Tensors& tensors_;
  bool stacked_;
};

inline Layers temporal_layers(const Tensors& tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "statecache: no state tensor was given");
  const Layers layers(tensors, tensors.front().dim() == 5);
  STD_TORCH_CHECK(layers.dim() == 4, "statecache: need [layers, slots, heads, d_v, d_k]");
  return layers;
}

inline const int64_t* slot_list(const Tensor& state, const Tensor& slots, int64_t listed) {
  STD_TORCH_CHECK(slots.dim() == 1 && slots.scalar_type() == ScalarType::Long &&
                      slots.is_contiguous() && slots.numel() == listed,
                  "statecache: slots must be two int64 vectors of one length");
  STD_TORCH_CHECK(on_one_device(state, slots), "statecache: slots lie on another device");
  STD_TORCH_CHECK(listed <= 65535, "statecache: at most 65535 slots in one call");
  return static_cast<const int64_t*>(slots.data_ptr());
}

inline int32_t* checked_report(const Tensor& state, const Tensor& report, int64_t listed) {
  STD_TORCH_CHECK(report.dim() == 1 && report.scalar_type() == ScalarType::Int &&
                      report.is_contiguous() && report.numel() == listed &&
                      on_one_device(state, report),
                  "statecache: the report must be an int32 vector, one entry a listed slot");
  return static_cast<int32_t*>(report.data_ptr());
}

inline CheckpointCopy describe(const Layers& active, const Tensor& quantized, const Tensor& scale,
                               const Tensor& active_slots, const Tensor& slots) {
  const ScalarType type = active.first().scalar_type();
  STD_TORCH_CHECK(
      type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16,
      "statecache: a temporal state is float32, float16 or bfloat16");
  const int64_t heads = active.size(1);
  const int64_t d_v = active.size(2);
  const int64_t d_k = active.size(3);
  STD_TORCH_CHECK(
      active.stride(3) == 1 && active.stride(2) == d_k && d_k % 8 == 0 && d_v % 8 == 0,
      "statecache: a head's state must be rows without gaps, d_v and d_k multiples of 8");
  // As 32-bit numbers, and as one dimension of a grid: heads times tiles of at least 32 columns.
  STD_TORCH_CHECK(heads <= INT32_MAX && d_v <= INT32_MAX && d_k <= INT32_MAX - 31 &&
                      heads * ((d_k + 31) / 32) <= INT32_MAX,
                  "statecache: too many heads, rows or columns");
  STD_TORCH_CHECK(quantized.dim() == 5 && quantized.scalar_type() == ScalarType::Char &&
                      quantized.size(0) == active.count() && quantized.size(2) == heads &&
                      quantized.size(3) == d_v && quantized.size(4) == d_k &&
                      quantized.stride(4) == 1 && quantized.stride(3) == d_k,
                  "statecache: the int8 states do not fit the active ones");
  STD_TORCH_CHECK(
      scale.dim() == 5 &&
          scale.scalar_type() == (type == ScalarType::BFloat16 ? type : ScalarType::Float) &&
          scale.size(0) == active.count() && scale.size(1) == quantized.size(1) &&
          scale.size(2) == heads && scale.size(3) == 1 && scale.size(4) == d_k &&
          scale.stride(4) == 1,
      "statecache: the scales do not fit the states (bfloat16 for bfloat16, else float32)");
  STD_TORCH_CHECK(on_one_device(active.first(), quantized) && on_one_device(active.first(), scale),
                  "statecache: the pools lie on different devices");

  CheckpointCopy copy{};
  copy.active_slot_stride = active.stride_bytes(0);
  copy.active_head_stride = active.stride_bytes(1);
  copy.active_slot_count = active.size(0);
  copy.quantized_layer_stride = quantized.stride(0);
  copy.quantized_slot_stride = quantized.stride(1);
  copy.quantized_head_stride = quantized.stride(2);
  copy.scale_layer_stride = bytes_of(scale, scale.stride(0));
  copy.scale_slot_stride = bytes_of(scale, scale.stride(1));
  copy.scale_head_stride = bytes_of(scale, scale.stride(2));
  copy.checkpoint_slot_count = quantized.size(1);
  const int64_t listed = active_slots.numel();
  copy.active_slots = slot_list(active.first(), active_slots, listed);
  copy.checkpoint_slots = slot_list(active.first(), slots, listed);
  copy.listed = static_cast<int32_t>(listed);
  copy.heads = static_cast<int32_t>(heads);
  copy.d_v = static_cast<int32_t>(d_v);
  copy.d_k = static_cast<int32_t>(d_k);
  copy.type = type == ScalarType::Float  ? StateType::kFloat32
              : type == ScalarType::Half ? StateType::kFloat16
                                         : StateType::kBfloat16;
  return copy;
}

// One tensor of rows: slots in front, or behind the layers.
class Rows {
 public:
  Rows(const Tensor& tensor, int64_t slot_dim) : tensor_(tensor), slot_dim_(slot_dim) {}

  int64_t layers() const { return slot_dim_ == 1 ? tensor_.size(0) : 1; }
  int64_t slots() const { return tensor_.size(slot_dim_); }
  int64_t slot_stride() const { return bytes_of(tensor_, tensor_.stride(slot_dim_)); }
  std::byte* layer(int64_t index) const {
    return address(tensor_) + (slot_dim_ == 1 ? bytes_of(tensor_, index * tensor_.stride(0)) : 0);
  }

 private:
  const Tensor& tensor_;
  int64_t slot_dim_;
};

// Bytes of a row of both tensors.
inline int64_t checked_row(const Tensor& source, const Tensor& target, int64_t slot_dim) {
  STD_TORCH_CHECK(slot_dim == 0 || slot_dim == 1, "statecache: slots are dimension 0 or 1");
  const int64_t dims = source.dim();
  STD_TORCH_CHECK(dims == target.dim() && dims > slot_dim &&
                      source.scalar_type() == target.scalar_type() && on_one_device(source, target),
                  "statecache: source and target differ in shape, type or device");
  int64_t row = 1;
  for (int64_t d = dims - 1; d > slot_dim; --d) {
    const int64_t size = source.size(d);
    STD_TORCH_CHECK(size == target.size(d), "statecache: rows differ in shape");
    STD_TORCH_CHECK(size == 1 || (source.stride(d) == row && target.stride(d) == row),
                    "statecache: a row must be without gaps");
    row *= size;
  }
  STD_TORCH_CHECK(slot_dim == 0 || target.size(0) == source.size(0),
                  "statecache: source and target differ in layers");
  return bytes_of(source, row);
}

}  // namespace statecache

#endif  // STATECACHE_BINDINGS_CHECKPOINT_ARGUMENTS_H_

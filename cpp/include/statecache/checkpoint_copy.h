#ifndef STATECACHE_CHECKPOINT_COPY_H_
#define STATECACHE_CHECKPOINT_COPY_H_

#include <cstdint>

namespace statecache {

// Copies recurrent states between an engine's active pool and an int8 checkpoint pool, all layers
// and all listed slots at once. Raw addresses only: who owns the memory, and which framework made
// it, is not known here.
//
// The format. A temporal state of one head is a d_v x d_k matrix with one symmetric scale a column:
//   scale = max(largest magnitude of the column, 1e-8) / 127, rounded to the scale's type
//   q     = x / scale, rounded half to even; within +-127 in any finite column
//   x     = q * scale, rounded to the state's type
// All arithmetic is IEEE single precision, rounded to nearest even at each step. The scale's type
// is bfloat16 for a bfloat16 state and float for float and float16 states.

enum class StateType : int32_t { kFloat32, kFloat16, kBfloat16 };

// Layers moved by one call. Their addresses travel by value, so that a launch needs no table in
// device memory and may be captured in a graph. Models with more layers take several calls.
inline constexpr int kMaxLayers = 128;

// What a store reports for each listed pair of slots: bits, to be set to 0 by the caller before.
inline constexpr int32_t kStored = 1;     // the pair was valid and its first layer was written
inline constexpr int32_t kNonFinite = 2;  // NaN or Inf in the source, or a scale so large that the
                                          // copy would come back as Inf: do not keep the slot

// One copy in either direction. Strides are in bytes. A d_v x d_k matrix lies row by row without
// gaps in both pools, a head's scales likewise; everything is aligned to its element. d_k is a
// multiple of 8.
// A pair is skipped when either slot is negative or not below its pool's slot count.
struct CheckpointCopy {
  void* active[kMaxLayers];  // by layer: slot 0, head 0
  int64_t active_slot_stride;
  int64_t active_head_stride;
  int64_t active_slot_count;

  void* quantized;  // int8: layer 0, slot 0, head 0
  int64_t quantized_layer_stride;
  int64_t quantized_slot_stride;
  int64_t quantized_head_stride;

  void* scale;  // layer 0, slot 0, head 0
  int64_t scale_layer_stride;
  int64_t scale_slot_stride;
  int64_t scale_head_stride;
  int64_t checkpoint_slot_count;

  const int64_t* active_slots;      // `listed` of them, on the device that copies
  const int64_t* checkpoint_slots;  // likewise
  int32_t* report;                  // likewise; unused by loads, may then be null

  int32_t layers;  // at most kMaxLayers
  int32_t listed;
  int32_t heads;
  int32_t d_v;
  int32_t d_k;
  StateType type;
};

// Rows of any lengths copied bit for bit between two pools, all tensors at once: convolution
// states, side states, or whole states that are not quantised. A row lies without gaps, at any
// alignment. A tensor without a layer dimension has one layer; the layers of all tensors are
// numbered through. Skips pairs as above; the report, if there is one, gets kStored for each pair
// that was valid.
inline constexpr int kMaxRowLayers = 192;
inline constexpr int kMaxRowShapes = 16;

struct RowShape {
  int64_t source_slot_stride;  // bytes
  int64_t target_slot_stride;
  int64_t row_bytes;
};

struct RowCopy {
  const void* source[kMaxRowLayers];  // slot 0
  void* target[kMaxRowLayers];
  RowShape shapes[kMaxRowShapes];
  uint8_t shape[kMaxRowLayers];  // which of them each layer has
  int64_t source_slot_count;
  int64_t target_slot_count;
  const int64_t* source_slots;  // `listed` of them, on the device that copies
  const int64_t* target_slots;  // likewise
  int32_t* report;              // likewise; may be null
  int32_t layers;               // at most kMaxRowLayers
  int32_t shape_count;          // at most kMaxRowShapes
  int32_t listed;
};
static_assert(sizeof(RowCopy) <= 4096 && sizeof(CheckpointCopy) <= 4096,
              "what every GPU takes as the arguments of a kernel");

inline int64_t longest_row(const RowCopy& copy) {
  int64_t longest = 0;
  for (int i = 0; i < copy.shape_count; ++i) {
    if (copy.shapes[i].row_bytes > longest) longest = copy.shapes[i].row_bytes;
  }
  return longest;
}

// CPU. The work is cut into tiles that touch disjoint memory, except `report`, which is updated
// atomically: any threads may share the range [0, tile_count). O(bytes); at most 16 KiB of scratch
// on the stack.
int64_t tile_count(const CheckpointCopy& copy);
int64_t tile_count(const RowCopy& copy);
void quantize_tiles(const CheckpointCopy& copy, int64_t first, int64_t last);
void dequantize_tiles(const CheckpointCopy& copy, int64_t first, int64_t last);
void copy_tiles(const RowCopy& copy, int64_t first, int64_t last);

// The instruction sets of the CPU code, by rising speed. The functions above use the best one the
// machine has; all give the same bits, but in columns with NaN or Inf. kAvx2 is x86-64-v3, with FMA
// and F16C; kAvx512 is x86-64-v4.
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
bool is_supported(InstructionSet set);
void quantize_tiles(InstructionSet set, const CheckpointCopy& copy, int64_t first, int64_t last);
void dequantize_tiles(InstructionSet set, const CheckpointCopy& copy, int64_t first, int64_t last);

// CUDA, built only where there is a CUDA compiler. One kernel launch on `stream` (a cudaStream_t)
// of the current device; no allocation, no synchronisation. Matrices with d_v and d_k in {64, 128,
// 256} at 16-byte aligned addresses are read and written once; all others take a general path that
// reads twice, by 16 bytes where all is aligned. Rows go by 16 bytes where source and target are
// equally far from such an address, else by the largest word that is. Returns a cudaError_t, 0 for
// success.
int quantize_cuda(const CheckpointCopy& copy, void* stream);
int dequantize_cuda(const CheckpointCopy& copy, void* stream);
int copy_cuda(const RowCopy& copy, void* stream);
const char* cuda_error_text(int error);

}  // namespace statecache

#endif  // STATECACHE_CHECKPOINT_COPY_H_

// The few kernels that the device has, all of which only move bytes: concat, split, contiguous and strided_copy.
//
// Paddle calls a kernel in two ways: with a context that holds its arguments, or, from its C++ functions, with the
// arguments themselves, whose types here stand for Paddle's own, of which nothing but the address is used.
#pragma once

#include <numeric>
#include <vector>

#include "device.h"
#include "paddle/phi/capi/include/c_kernel_context.h"
#include "paddle/phi/capi/include/c_kernel_registry.h"

namespace test_device {

struct Move {
  std::byte* to;
  const std::byte* from;
  size_t size;
};

// Elements with strides, in bytes.
struct Strided {
  std::vector<int64_t> dims, strides;

  static Strided of(const PD_Tensor& tensor, int64_t item) {
    C_Status status;
    Strided found;
    for (int64_t i = 0; i < PD_TensorGetNumDims(&tensor, &status); ++i) {
      found.dims.push_back(PD_TensorGetDim(&tensor, i, &status));
      found.strides.push_back(PD_TensorGetStride(&tensor, i, &status) * item);
    }
    return found;
  }

  int64_t count() const { return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>()); }

  // Bytes from the first element to behind the last.
  size_t span(size_t item) const {
    size_t bytes = count() ? item : 0;
    for (size_t i = 0; i < dims.size() && bytes; ++i) bytes += (dims[i] - 1) * strides[i];
    return bytes;
  }

  // Where each element is, in row-major order.
  template <typename Visit>
  void each(Visit visit) const {
    std::vector<int64_t> index(dims.size(), 0);
    int64_t at = 0;
    for (int64_t left = count(); left > 0; --left) {
      visit(at);
      for (size_t d = dims.size(); d-- > 0;) {
        at += strides[d];
        if (++index[d] < dims[d]) break;
        at -= strides[d] * dims[d];
        index[d] = 0;
      }
    }
  }
};

inline size_t bytes_of(const PD_Tensor& tensor, size_t item) {
  C_Status status;
  return PD_TensorGetElementCount(&tensor, &status) * item;
}

inline size_t item_of(const PD_Tensor& tensor) {
  C_Status status;
  switch (PD_TensorGetPDDataType(&tensor, &status)) {
    case BOOL: case UINT8: case INT8: return 1;
    case INT16: case UINT16: case FLOAT16: case BFLOAT16: return 2;
    case INT32: case UINT32: case FLOAT32: return 4;
    case COMPLEX128: return 16;
    default: return 8;
  }
}

inline std::byte* address_of(const PD_Tensor& tensor, size_t size) {
  C_Status status;
  std::byte* found = Runtime::get().own(PD_TensorGetDataPointer(&tensor, &status), size);
  if (!found) refuse("a kernel got an address that is not the device's");
  return found;
}

// Gives an output memory unless it has enough.
inline void allocate(const PD_DeviceContext& context, PD_Tensor& out, const PD_Tensor& like) {
  C_Status status;
  PD_DeviceContextAllocateTensor(&context, &out, 0, PD_TensorGetPDDataType(&like, &status), &status);
}

template <typename Work>
void run(const char* name, const PD_DeviceContext& context, size_t bytes, Work work) {
  C_Status status;
  Runtime::get().counters.add(name, bytes);
  reinterpret_cast<Stream*>(PD_DeviceContextGetStream(&context, &status))->submit(work);
}

inline void move_all(const char* name, const PD_DeviceContext& context, const std::vector<Move>& moves, size_t bytes) {
  run(name, context, bytes, [moves] {
    for (const Move& move : moves) std::memcpy(move.to, move.from, move.size);
  });
}

inline void concat(const PD_DeviceContext& context, const std::vector<const PD_Tensor*>& in, const PD_Scalar&,
                   PD_Tensor* out) {  // along the first dimension only, and of contiguous tensors
  allocate(context, *out, *in.at(0));
  const size_t item = item_of(*out), all = bytes_of(*out, item);
  std::byte* to = address_of(*out, all);
  std::vector<Move> moves;
  for (const PD_Tensor* one : in) {
    const size_t size = bytes_of(*one, item);
    moves.push_back({to, address_of(*one, size), size});
    to += size;
  }
  move_all("kernel_concat", context, moves, all);
}

inline void split(const PD_DeviceContext& context, const PD_Tensor& in, const PD_IntArray&, const PD_Scalar&,
                  std::vector<PD_Tensor*> out) {  // likewise
  const size_t item = item_of(in), all = bytes_of(in, item);
  const std::byte* from = address_of(in, all);
  std::vector<Move> moves;
  for (PD_Tensor* one : out) {
    allocate(context, *one, in);
    const size_t size = bytes_of(*one, item);
    moves.push_back({address_of(*one, size), from, size});
    from += size;
  }
  move_all("kernel_split", context, moves, all);
}

inline void contiguous(const PD_DeviceContext& context, const PD_Tensor& in, PD_Tensor* out) {
  const size_t item = item_of(in), all = bytes_of(in, item);
  const Strided view = Strided::of(in, item);
  C_Status status;
  std::vector<int64_t> strides(view.dims.size(), 1);
  for (size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * view.dims[d];
  PD_TensorSetStrides(out, strides.size(), strides.data(), &status);
  allocate(context, *out, in);
  std::byte* to = address_of(*out, all);
  const std::byte* from = address_of(in, view.span(item));
  run("kernel_contiguous", context, all, [=] {
    std::byte* next = to;
    view.each([&](int64_t at) { std::memcpy(std::exchange(next, next + item), from + at, item); });
  });
}

inline void strided_copy(const PD_DeviceContext& context, const PD_Tensor& in, const std::vector<int64_t>& dims,
                         const std::vector<int64_t>& strides, int64_t offset, PD_Tensor* out) {
  C_Status status;
  const size_t item = item_of(in), all = bytes_of(in, item);
  PD_TensorSetDims(out, dims.size(), dims.data(), &status);
  PD_TensorSetStrides(out, strides.size(), strides.data(), &status);
  PD_TensorSetOffset(out, offset, &status);
  const Strided source = Strided::of(in, item), view = Strided::of(*out, item);
  const std::byte* from = address_of(in, source.span(item));
  std::byte* to = address_of(*out, view.span(item));
  run("kernel_strided_copy", context, all, [=] {
    std::vector<int64_t> places;
    source.each([&](int64_t at) { places.push_back(at); });
    auto place = places.begin();
    view.each([&](int64_t at) { std::memcpy(to + at, from + *place++, item); });
  });
}

// ---- the same for contexts that hold the arguments

inline const PD_DeviceContext& context_of(PD_KernelContext* ctx) { return *PD_KernelContextGetDeviceContext(ctx); }

template <typename Tensor>
std::vector<Tensor*> taken(PD_List list) {
  auto** first = static_cast<Tensor**>(list.data);
  std::vector<Tensor*> found(first, first + list.size);
  PD_DeletePointerList(list);
  return found;
}

inline std::vector<int64_t> numbers(PD_List list) {
  const auto* first = static_cast<const int64_t*>(list.data);
  return {first, first + list.size};
}

inline void concat_held(PD_KernelContext* ctx) {
  concat(context_of(ctx), taken<const PD_Tensor>(PD_KernelContextMultiInputAt(ctx, 0)),
         *PD_KernelContextScalarAttrAt(ctx, 0), PD_KernelContextOutputAt(ctx, 0));
}

inline void split_held(PD_KernelContext* ctx) {
  split(context_of(ctx), *PD_KernelContextInputAt(ctx, 0), *PD_KernelContextIntArrayAttrAt(ctx, 0),
        *PD_KernelContextScalarAttrAt(ctx, 1), taken<PD_Tensor>(PD_KernelContextMultiOutputAt(ctx, 0)));
}

inline void contiguous_held(PD_KernelContext* ctx) {
  contiguous(context_of(ctx), *PD_KernelContextInputAt(ctx, 0), PD_KernelContextOutputAt(ctx, 0));
}

inline void strided_copy_held(PD_KernelContext* ctx) {
  strided_copy(context_of(ctx), *PD_KernelContextInputAt(ctx, 0), numbers(PD_KernelContextListInt64AttrAt(ctx, 0)),
               numbers(PD_KernelContextListInt64AttrAt(ctx, 1)), PD_KernelContextInt64AttrAt(ctx, 2),
               PD_KernelContextOutputAt(ctx, 0));
}

inline void register_kernels(const char* device) {
  using Types = std::vector<PD_KernelArgumentType>;
  const auto tell = [device](const char* name, Types in, Types attributes, Types out, void (*held)(PD_KernelContext*),
                             void* direct) {
    for (const C_DataType type : {BOOL, UINT8, INT8, INT16, INT32, INT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16,
                                  COMPLEX64, COMPLEX128}) {
      PD_RegisterPhiKernel(name, device, type, ALL_LAYOUT, in.size(), in.data(), attributes.size(), attributes.data(),
                           out.size(), out.data(), [](const PD_KernelKey*, PD_Kernel*) {}, held, direct);
    }
  };
  const auto one = PD_ARG_TYPE_TENSOR, many = PD_ARG_TYPE_LIST_TENSOR, scalar = PD_ARG_TYPE_SCALAR;
  const auto list = PD_ARG_TYPE_LIST_INT64;
  tell("concat", {PD_ARG_TYPE_CONTEXT, many}, {scalar}, {one}, concat_held, reinterpret_cast<void*>(&concat));
  tell("split", {PD_ARG_TYPE_CONTEXT, one}, {PD_ARG_TYPE_INT_ARRAY, scalar}, {many}, split_held,
       reinterpret_cast<void*>(&split));
  tell("contiguous", {PD_ARG_TYPE_CONTEXT, one}, {}, {one}, contiguous_held, reinterpret_cast<void*>(&contiguous));
  tell("strided_copy", {PD_ARG_TYPE_CONTEXT, one}, {list, list, PD_ARG_TYPE_INT64}, {one}, strided_copy_held,
       reinterpret_cast<void*>(&strided_copy));
}

}  // namespace test_device

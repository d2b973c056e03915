// Elementwise reductions of what several ranks sent, in the order of the ranks.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace test_device {

inline size_t size_of(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    case UINT64: case INT64: case FLOAT64: case COMPLEX64: return 8;
    case COMPLEX128: return 16;
    default: return 0;
  }
}

// Values of 16 bits are summed in float and rounded once, at the end, to the nearest, ties to even.
struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  static BFloat16 of(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    if (std::isnan(value)) return {static_cast<uint16_t>(wide >> 16 | 0x40)};
    return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
  }
};

struct Float16 {
  uint16_t bits;
  operator float() const {
    const int exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
    float value;
    if (exponent == 0x1f) {
      value = fraction ? NAN : INFINITY;
    } else {
      value = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(float(fraction), -24);
    }
    return bits & 0x8000 ? -value : value;
  }
  static Float16 of(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (std::isnan(value)) return {0x7e00};
    if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
    if (size < 0x1p-14f) return {static_cast<uint16_t>(sign | int(std::nearbyint(size * 0x1p24f)))};
    int exponent;
    const float fraction = std::frexp(size, &exponent);  // 0.5 <= fraction < 1
    // A fraction that rounds up to 2048 carries into the exponent, as it should.
    return {static_cast<uint16_t>(sign | (((exponent + 14) << 10) + int(std::nearbyint(fraction * 2048)) - 1024))};
  }
};

template <typename Wide>
Wide combined(Wide left, Wide right, C_CCLReduceOp op) {
  if (op == SUM || op == AVG) return left + right;
  if (op == PRODUCT) return left * right;
  if constexpr (std::is_arithmetic_v<Wide>) {
    if (op == MAX) return std::max(left, right);
    if (op == MIN) return std::min(left, right);
  }
  return left;
}

template <typename Value, typename Wide>
Value narrowed(Wide value) {
  if constexpr (std::is_same_v<Value, Float16> || std::is_same_v<Value, BFloat16>) {
    return Value::of(value);
  } else {
    return static_cast<Value>(value);
  }
}

template <typename Value, typename Wide = Value>
void reduce_as(const std::vector<const void*>& inputs, void* output, size_t count, C_CCLReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    Wide sum = static_cast<const Value*>(inputs[0])[i];
    for (size_t rank = 1; rank < inputs.size(); ++rank) {
      sum = combined<Wide>(sum, static_cast<const Value*>(inputs[rank])[i], op);
    }
    if (op == AVG) sum = static_cast<Wide>(sum / static_cast<Wide>(inputs.size()));
    static_cast<Value*>(output)[i] = narrowed<Value, Wide>(sum);
  }
}

inline bool can_reduce(C_DataType type, C_CCLReduceOp op) {
  const bool complex = type == COMPLEX64 || type == COMPLEX128;
  return size_of(type) > 0 && !(complex && (op == MAX || op == MIN));
}

inline void reduce(const std::vector<const void*>& inputs, void* out, size_t n, C_DataType type, C_CCLReduceOp op) {
  switch (type) {
    case BOOL: return reduce_as<bool, int>(inputs, out, n, op);
    case UINT8: return reduce_as<uint8_t>(inputs, out, n, op);
    case INT8: return reduce_as<int8_t>(inputs, out, n, op);
    case UINT16: return reduce_as<uint16_t>(inputs, out, n, op);
    case INT16: return reduce_as<int16_t>(inputs, out, n, op);
    case UINT32: return reduce_as<uint32_t>(inputs, out, n, op);
    case INT32: return reduce_as<int32_t>(inputs, out, n, op);
    case UINT64: return reduce_as<uint64_t>(inputs, out, n, op);
    case INT64: return reduce_as<int64_t>(inputs, out, n, op);
    case FLOAT16: return reduce_as<Float16, float>(inputs, out, n, op);
    case BFLOAT16: return reduce_as<BFloat16, float>(inputs, out, n, op);
    case FLOAT32: return reduce_as<float>(inputs, out, n, op);
    case FLOAT64: return reduce_as<double>(inputs, out, n, op);
    case COMPLEX64: return reduce_as<std::complex<float>>(inputs, out, n, op);
    case COMPLEX128: return reduce_as<std::complex<double>>(inputs, out, n, op);
    default: return;
  }
}

}  // namespace test_device

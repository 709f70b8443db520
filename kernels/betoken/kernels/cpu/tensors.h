// What operators ask of torch's tensors.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>

#include "linear.h"

namespace betoken {

template <class T>
T* data(const at::Tensor& tensor) {
  return reinterpret_cast<T*>(tensor.data_ptr());
}

// Dense rows whose length is a whole number of tiles.
inline at::Tensor padded_rows(const at::Tensor& x) {
  const int64_t k = x.size(-1);
  return k % kDepth ? at::constant_pad_nd(x, {0, ceil_to(k, kDepth) - k}) : x.contiguous();
}

}  // namespace betoken

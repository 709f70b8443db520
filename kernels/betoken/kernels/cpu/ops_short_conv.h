// The short convolution over torch's tensors, whatever their type.
#pragma once
#include <ATen/ops/empty.h>

#include "short_conv.h"
#include "tensors.h"

namespace betoken {

template <class T>
void convolve_typed(const at::Tensor* x, void* inputs, const at::Tensor& weight, const at::Tensor* bias,
                    const Rows& rows, int64_t page_size, at::Tensor& out) {
  short_conv(ShortConv<T>{x ? data<const T>(*x) : nullptr, static_cast<T*>(inputs), data<const T>(weight),
                          bias ? data<const T>(*bias) : nullptr, data<T>(out), rows, page_size, weight.size(1),
                          weight.size(0)});
}

// x [R, C], written first, or null; inputs [pages, page_size, C], weight [L, C], bias [C] -> [R, C].
inline at::Tensor convolve_any(const at::Tensor* x, void* inputs, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, const Rows& rows, int64_t page_size) {
  TORCH_CHECK(weight.dim() == 2 && (!x || (weight.size(1) == x->size(1) && weight.scalar_type() == x->scalar_type())) &&
                  (!bias || (bias->numel() == weight.size(1) && bias->scalar_type() == weight.scalar_type())),
              "weight and bias do not fit the inputs");
  const at::Tensor dense = weight.contiguous();
  const at::Tensor dense_bias = bias ? bias->contiguous() : at::Tensor();
  const at::Tensor* given_bias = bias ? &dense_bias : nullptr;
  at::Tensor out = at::empty({rows.num_rows, weight.size(1)}, weight.options());
  if (weight.scalar_type() == at::kBFloat16)
    convolve_typed<bf16>(x, inputs, dense, given_bias, rows, page_size, out);
  else
    convolve_typed<float>(x, inputs, dense, given_bias, rows, page_size, out);
  return out;
}

}  // namespace betoken

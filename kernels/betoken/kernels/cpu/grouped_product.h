// Tensors in and out of products of weights of few bits, exact ones and ones of rounded rows.
#pragma once
#include <ATen/ops/empty.h>

#include "linear_grouped_job.h"
#include "tensors.h"

namespace betoken {

// num_bytes: of one weight.
inline void check_packed(const GroupedLayout& layout, int64_t num_bytes, int64_t n) {
  TORCH_CHECK(num_bytes == ceil_to(n, kColumns) / kColumns * layout.bytes, "packed weights of another shape");
}

// x [..., K] -> [..., N] of this type: x's type, or float. multiply: runs a GroupedLinear of any type.
template <class Multiply>
at::Tensor grouped_product(Multiply multiply, at::ScalarType type, const at::Tensor& x, const at::Tensor& packed,
                           const std::optional<at::Tensor>& bias, int64_t n, int64_t format) {
  auto sizes = x.sizes().vec();
  sizes.back() = n;
  at::Tensor out = at::empty(sizes, x.options().dtype(type));
  const at::Tensor rows = padded_rows(x);
  const GroupedLayout layout(GroupedFormat::of(format), rows.size(-1));
  check_packed(layout, packed.numel(), n);
  const int64_t num_rows = rows.numel() / layout.k;
  auto run = [&](auto number) {
    using T = decltype(number);
    Linear<T> results{nullptr, nullptr, bias ? data<T>(*bias) : nullptr, nullptr, num_rows, layout.k, n};
    if (type == at::kFloat) results.sums = data<float>(out);
    else results.y = data<T>(out);
    multiply(GroupedLinear<T>{data<T>(rows), data<uint8_t>(packed), results, num_rows, layout});
  };
  if (x.scalar_type() == at::kBFloat16) run(bf16{});
  else run(float{});
  return out;
}

// x [S, K], packed [E, ...], bias [E, N], expert_ids [S] -> [S, N]: row s through expert expert_ids[s].
template <class T, class Multiply>
void expert_rows(Multiply multiply, const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                 const int64_t* expert_ids, int64_t n, const GroupedLayout& layout, at::Tensor& out) {
  const int64_t k = x.size(1), num_experts = packed.size(0);
  std::vector<std::vector<int64_t>> rows_of(num_experts);
  for (int64_t row = 0; row < x.size(0); ++row)
    if (expert_ids[row] >= 0 && expert_ids[row] < num_experts) rows_of[expert_ids[row]].push_back(row);
    else std::memset(data<T>(out) + row * n, 0, sizeof(T) * n);
  std::vector<T> from, to;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const std::vector<int64_t>& rows = rows_of[expert];
    const int64_t num_rows = int64_t(rows.size());
    if (num_rows == 0) continue;
    from.resize(num_rows * k);
    to.resize(num_rows * n);
    for (int64_t i = 0; i < num_rows; ++i) std::memcpy(&from[i * k], data<T>(x) + rows[i] * k, sizeof(T) * k);
    const Linear<T> results{nullptr, nullptr, bias ? data<T>(*bias) + expert * n : nullptr, to.data(), num_rows, k, n};
    multiply(GroupedLinear<T>{from.data(), data<uint8_t>(packed) + expert * packed.size(1), results, num_rows, layout});
    for (int64_t i = 0; i < num_rows; ++i) std::memcpy(data<T>(out) + rows[i] * n, &to[i * n], sizeof(T) * n);
  }
}

template <class Multiply>
at::Tensor expert_product(Multiply multiply, const at::Tensor& x, const at::Tensor& packed,
                          const std::optional<at::Tensor>& bias, const at::Tensor& expert_ids, int64_t n,
                          int64_t format) {
  const at::Tensor ids = expert_ids.to(at::kLong).contiguous(), rows = padded_rows(x);
  const GroupedLayout layout(GroupedFormat::of(format), rows.size(1));
  check_packed(layout, packed.size(1), n);
  const std::optional<at::Tensor> dense_bias = bias ? std::optional<at::Tensor>(bias->contiguous()) : std::nullopt;
  at::Tensor out = at::empty({x.size(0), n}, x.options());
  if (x.scalar_type() == at::kBFloat16)
    expert_rows<bf16>(multiply, rows, packed, dense_bias, ids.data_ptr<int64_t>(), n, layout, out);
  else
    expert_rows<float>(multiply, rows, packed, dense_bias, ids.data_ptr<int64_t>(), n, layout, out);
  return out;
}

}  // namespace betoken

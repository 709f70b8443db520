// The operators on low-bit weights, a separate library: ops.cpp declares their arguments.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "grouped_pack.h"
#include "grouped_product.h"
#include "linear_grouped.h"

namespace betoken {
namespace {

const uint8_t* bytes_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? static_cast<const uint8_t*>(tensor->data_ptr()) : nullptr;
}

// A weight [N, K] as its format's own tensors, dense, see grouped.py -> a flat tensor in the layout of grouped.h.
at::Tensor pack_grouped(const at::Tensor& values, const std::optional<at::Tensor>& high, const at::Tensor& scales,
                        const std::optional<at::Tensor>& scale_units, const std::optional<at::Tensor>& offsets,
                        const std::optional<at::Tensor>& offset_units, int64_t k, int64_t format) {
  const GroupedLayout layout(GroupedFormat::of(format), ceil_to(k, kDepth));
  const int64_t n = values.size(0), num_columns = ceil_to(n, kColumns) / kColumns;
  const GroupedSource source{bytes_of(values), bytes_of(high),         bytes_of(scales), bytes_of(scale_units),
                             bytes_of(offsets), bytes_of(offset_units), n,                k,
                             scales.size(1),    scale_units ? scale_units->size(1) : 0};
  at::Tensor packed = at::empty({num_columns * layout.bytes}, at::TensorOptions().dtype(at::kByte));
  auto body = [&](int group) {
    pack_columns(source, layout, int64_t(group) * kColumns, data<uint8_t>(packed) + group * layout.bytes);
  };
  parallel(int(num_columns), body);
  return packed;
}

// Runs by the kernels for exact rows.
struct MultiplyExactly {
  template <class T>
  void operator()(const GroupedLinear<T>& job) const {
    linear_grouped(job);
  }
};

at::Tensor linear_grouped_op(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                             int64_t n, int64_t format) {
  return grouped_product(MultiplyExactly(), x.scalar_type(), x, packed, bias, n, format);
}

// The same, not rounded to the type of x.
at::Tensor linear_grouped_sums(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                               int64_t n, int64_t format) {
  return grouped_product(MultiplyExactly(), at::kFloat, x, packed, bias, n, format);
}

at::Tensor expert_linear_grouped(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                                 const at::Tensor& expert_ids, int64_t n, int64_t format) {
  return expert_product(MultiplyExactly(), x, packed, bias, expert_ids, n, format);
}

// ids [...] -> those rows of the weight, [..., k] float.
at::Tensor grouped_rows_op(const at::Tensor& ids, const at::Tensor& packed, int64_t n, int64_t k, int64_t format) {
  const at::Tensor dense = ids.contiguous();
  const int64_t* first = dense.data_ptr<int64_t>();
  for (int64_t i = 0; i < dense.numel(); ++i)
    TORCH_CHECK(first[i] >= 0 && first[i] < n, "row ", std::to_string(first[i]), " of a weight with ",
                std::to_string(n));
  const GroupedLayout layout(GroupedFormat::of(format), ceil_to(k, kDepth));
  check_packed(layout, packed.numel(), n);
  auto sizes = ids.sizes().vec();
  sizes.push_back(k);
  at::Tensor out = at::empty(sizes, at::TensorOptions().dtype(at::kFloat));
  grouped_rows(layout, data<uint8_t>(packed), first, dense.numel(), k, data<float>(out));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(betoken, CPU, library) {
  library.impl("pack_grouped", pack_grouped);
  library.impl("linear_grouped", linear_grouped_op);
  library.impl("linear_grouped_sums", linear_grouped_sums);
  library.impl("expert_linear_grouped", expert_linear_grouped);
  library.impl("grouped_rows", grouped_rows_op);
}

}  // namespace betoken

extern "C" {

void betoken_share_pool(void* pool) { betoken::Pool::share(pool); }

const char* betoken_exact_candidate(int index) {
  return index < int(std::size(betoken::kRowsAPass)) ? betoken::kRowsAPass[index].name : nullptr;
}

void betoken_exact_choose(int64_t format, int64_t rows, int candidate) {
  betoken::exact_choices().choose(betoken::GroupedFormat::of(format), rows, candidate);
}
}

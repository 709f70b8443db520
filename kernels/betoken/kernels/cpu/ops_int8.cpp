// Products of low-bit weights and rows rounded to int8, a separate library: ops.cpp declares their arguments.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "grouped_product.h"
#include "int8_linear.h"

namespace betoken {
namespace {

struct MultiplyInt8 {
  template <class T>
  void operator()(const GroupedLinear<T>& job) const {
    TORCH_CHECK(takes_int8(job.at.format), "codes of kind ", std::to_string(job.at.format.code), " have no int8 product");
    linear_int8(job);
  }
};

at::Tensor linear_int8_op(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n,
                          int64_t format) {
  return grouped_product(MultiplyInt8(), x.scalar_type(), x, packed, bias, n, format);
}

// The same, not rounded to the type of x.
at::Tensor linear_int8_sums(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                            int64_t n, int64_t format) {
  return grouped_product(MultiplyInt8(), at::kFloat, x, packed, bias, n, format);
}

at::Tensor expert_linear_int8(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                              const at::Tensor& expert_ids, int64_t n, int64_t format) {
  return expert_product(MultiplyInt8(), x, packed, bias, expert_ids, n, format);
}

}  // namespace

TORCH_LIBRARY_IMPL(betoken, CPU, library) {
  library.impl("linear_int8", linear_int8_op);
  library.impl("linear_int8_sums", linear_int8_sums);
  library.impl("expert_linear_int8", expert_linear_int8);
}

}  // namespace betoken

extern "C" {

void betoken_share_int8_pool(void* pool) { betoken::Pool::share(pool); }

// variants: `betoken_int8_variants` of another library.
void betoken_int8_add(void (*variants)(void* candidates, bool has_byte_dots)) {
  variants(&betoken::int8_candidates(), betoken::kHasByteDots);
}

const char* betoken_int8_candidate(int index) {
  const betoken::Int8Candidates& candidates = betoken::int8_candidates();
  return index < candidates.num ? candidates.all[index].name : nullptr;
}

void betoken_int8_choose(int64_t format, int64_t rows, int candidate) {
  betoken::int8_choices().choose(betoken::GroupedFormat::of(format), rows, candidate);
}
}

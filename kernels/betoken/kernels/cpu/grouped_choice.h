// Which of several kernels that give the same bits multiplies weights of few bits: chosen at load by measurement.
#pragma once
#include <atomic>

#include "grouped.h"
#include "grouped_ends.h"

namespace betoken {

constexpr int kFewRows = 8;

class Choices {
 public:
  // Index of the chosen candidate; 0 before any choice.
  int of(const GroupedFormat& format, int64_t rows) { return place(format, rows).load(std::memory_order_relaxed); }
  void choose(const GroupedFormat& format, int64_t rows, int candidate) { place(format, rows) = candidate; }

 private:
  std::atomic<int>& place(const GroupedFormat& format, int64_t rows) {
    return chosen_[format.layout()][dot_block(format) == 32][rows == 1 ? 0 : rows <= kFewRows ? 1 : 2];
  }

  std::atomic<int> chosen_[kFloat8 + 1][2][3] = {};
};

}  // namespace betoken

// What a product of weights of few bits is given, and how its rows are parted.
#pragma once
#include <algorithm>
#include <utility>

#include "grouped.h"
#include "linear.h"

namespace betoken {

constexpr int kMostDotRows = 6, kMostChunkRows = 8;  // with totals next to the sums, and with totals in memory

template <class T>
struct GroupedLinear {
  const T* x;             // [rows, k], k padded
  const uint8_t* packed;  // [N / 32] groups of columns
  Linear<T> out;          // where sums go: y, bias, n
  int64_t rows;
  const GroupedLayout& at;
  const float* floats = nullptr;  // x, unless it is multiplied in pairs
  const float* x_sums = nullptr;  // [k / block, rows], where offsets ask for them
  int rows_a_pass = kMostChunkRows;

  GroupedColumns columns(int64_t group) const { return {at, packed + group * at.bytes}; }

  // Store the sums of a group's columns, [rows][32].
  void finish_group(int64_t group, const float* sums) const {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < kColumns && group * kColumns + i < out.n; i += kLanes)
        out.finish(row, group * kColumns + i, load16(sums + row * kColumns + i));
  }
};

constexpr int kDepthChunk = 256;  // k that are decoded at a time for many rows

// operation(integral constant of a number of rows, first row) for as few parts of the rows as `most` rows a part allow,
// and no more than MOST, of even size.
template <int MOST, class Operation>
inline void by_even_rows(int64_t rows, int most, Operation operation) {
  most = std::min(most, MOST);
  const int64_t num_parts = (rows + most - 1) / most;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t row = rows * part / num_parts, num_rows = rows * (part + 1) / num_parts - row;
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (void)((num_rows == I + 1 && (operation(std::integral_constant<int, I + 1>(), row), true)) || ...);
    }(std::make_integer_sequence<int, MOST>());
  }
}

// body(group) for every group of columns, on the pool if they are many.
template <class T, class Body>
inline void over_groups(const GroupedLinear<T>& job, Body body) {
  const int num_groups = int(ceil_to(job.out.n, kColumns) / kColumns);
  if (num_groups * job.at.bytes * (job.rows > 4 ? job.rows / 4 : 1) < kMinParallelBytes)
    for (int group = 0; group < num_groups; ++group) body(group);
  else
    parallel(num_groups, body);
}

}  // namespace betoken

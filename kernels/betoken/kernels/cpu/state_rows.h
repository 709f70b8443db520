// A flat ragged batch over recurrent states; see betoken.kernels.state_rows.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace betoken {

struct StateRows {
  const int32_t *positions, *row_segments;
  const int32_t *states, *applied, *first_slots, *committed;  // [S] each
  const int32_t *path_starts, *path_slots;  // null: slot t holds position t throughout
  int64_t num_rows, num_segments;
  std::vector<int32_t> row_starts;  // [S + 1]

  void find_row_starts() {
    row_starts.assign(num_segments + 1, int32_t(num_rows));
    for (int64_t row = num_rows - 1; row >= 0; --row) row_starts[row_segments[row]] = int32_t(row);
    for (int64_t s = num_segments - 1; s >= 0; --s) row_starts[s] = std::min(row_starts[s], row_starts[s + 1]);
  }
  // The slot of a position on a row's path.
  int64_t slot_at(int64_t row, int64_t position) const {
    if (!path_starts) return position;
    const int64_t index = path_starts[row + 1] - 1 - (positions[row] - position);
    return index >= path_starts[row] ? path_slots[index] : position;
  }
  // The row that fills a slot in this forward; negative if an earlier forward did.
  int64_t row_at(int64_t segment, int64_t slot) const {
    const int64_t offset = slot - first_slots[segment];
    return offset < 0 ? -1 : row_starts[segment] + offset;
  }
};

}  // namespace betoken

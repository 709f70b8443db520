// In which order a head applies a batch's tokens to its state. It knows no numbers, only places.
#pragma once
#include "state_rows.h"

namespace betoken {

// One token to apply to a state.
struct Advance {
  int64_t at;  // the row, or the place in the rings, of its inputs
  int32_t reads;  // the row whose output is read from the state then; negative: none
  bool is_row;
  bool restarts;  // from the committed state; otherwise from the state after the advance before
  bool commits;  // the state then is the committed one
};

struct RecurrencePlan {
  std::vector<Advance> advances;
  std::vector<int64_t> starts;  // [S + 1], of each sequence's advances

  // A row whose parent is the row before goes on from it; others run along their whole path.
  void make(const StateRows& rows, int64_t num_waiting) {
    advances.clear();
    starts.assign(1, 0);
    for (int64_t segment = 0; segment < rows.num_segments; ++segment) {
      const int64_t applied = rows.applied[segment], committed = rows.committed[segment];
      auto add = [&](int64_t slot, bool is_read) {
        const int64_t row = rows.row_at(segment, slot);
        const int64_t place = int64_t(rows.states[segment]) * num_waiting + slot % num_waiting;
        advances.push_back({row >= 0 ? row : place, is_read ? int32_t(row) : -1, row >= 0, false, false});
      };
      const size_t begin = advances.size();
      for (int64_t slot = applied; slot < committed; ++slot) add(slot, rows.row_at(segment, slot) >= 0);
      if (advances.size() > begin) advances.back().commits = true;
      int64_t held = -1;  // the row whose path the advances so far have run along
      const int64_t end = rows.row_starts[segment + 1];
      for (int64_t row = first_uncommitted(rows, segment); row < end; ++row) {
        const int64_t position = rows.positions[row];
        const bool goes_on =
            held >= 0 && position > committed && rows.row_at(segment, rows.slot_at(row, position - 1)) == held;
        const size_t first = advances.size();
        for (int64_t at = goes_on ? position : committed; at <= position; ++at)
          add(rows.slot_at(row, at), at == position);
        if (!goes_on && held >= 0) advances[first].restarts = true;
        held = row;
      }
      if (advances.size() > begin) advances[begin].restarts = true;
      starts.push_back(int64_t(advances.size()));
    }
  }

  static int64_t first_uncommitted(const StateRows& rows, int64_t segment) {
    return rows.row_starts[segment] + std::max<int64_t>(0, rows.committed[segment] - rows.first_slots[segment]);
  }
};

}  // namespace betoken

// Paged attention of a flat ragged batch, chains and trees, and the write of its new keys and values.
//
// Sixteen queries (row, head) of one sequence and key head share a pass over the keys: a lane of a vector belongs to one
// query, so none can change another's bits. Keys are reduced in chunks of 256 absolute positions, in order, in float32.
// Where rows of a tree part ways, each path adds the places that are its own, for its lanes alone.
#pragma once
#include "attention_scores.h"
#include "attention_values.h"
#include "attention_weights.h"
#include "pool.h"

namespace betoken {

template <class T>
Lanes load_queries(const Attention<T>& job, const Block& block, int64_t head, Scratch& scratch) {
  Lanes lanes;
  const bool pairs = use_pairs(job);
  if (pairs) scratch.pairs.assign(job.key_size * kLanes, 0);
  else scratch.query.assign(job.key_size * kLanes, 0.0f);
  for (int i = 0; i < kLanes; ++i) {
    if (i >= block.num_queries) {
      lanes.first.set(i, lanes.first[0]);
      lanes.last.set(i, lanes.last[0]);
      continue;
    }
    const int64_t row = block.row(i, job.group), query_head = head * job.group + (block.first_query + i) % job.group;
    const T* query = job.query.at(row, query_head);
    lanes.last.set(i, job.rows.positions[row]);
    int64_t first = job.window ? std::max<int64_t>(0, lanes.last[i] - job.window + 1) : 0;
    if (job.span) first = std::max<int64_t>(first, lanes.last[i] / job.span * job.span);
    lanes.first.set(i, int32_t(first));
    if (job.slopes) lanes.slope.set(i, job.slopes[query_head]);
    lanes.begin = std::min<int64_t>(lanes.begin, lanes.first[i]);
    lanes.stop = std::max<int64_t>(lanes.stop, lanes.last[i] + 1);
    if (job.rows.path_length(row)) lanes.fork = std::min(lanes.fork, job.rows.fork(row));
    if (pairs) {
      for (int64_t d = 0; d < job.key_size; d += 2)
        std::memcpy(&scratch.pairs[d / 2 * 32 + i * 2], query + d, sizeof(uint32_t));
    } else {
      for (int64_t d = 0; d < job.key_size; ++d) scratch.query[d * kLanes + i] = to_float(query[d]);
    }
  }
  return lanes;
}

// Close a chunk: its weighted values join the sums.
inline void add_parts(Scratch& scratch) {
  for (size_t i = 0; i < scratch.sums.size(); i += kLanes)
    store16(&scratch.sums[i], load16(&scratch.sums[i]) + load16(&scratch.parts[i]));
}

// Read the data of all heads at places [from, to) in memory order: the hardware prefetcher then works, at
// several times the pace of `fetch`. Only if a whole chunk stays in the L2 cache.
template <class T>
void read_through(const T* cache, int64_t slot_size, int64_t from, int64_t to, const Scratch& scratch) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (slot_size > 8 * kLine) return;
  for (int64_t place = from; place < to; ++place)
    for (int64_t i = 0; i < slot_size; i += kLine) {
      uint16_t some;
      std::memcpy(&some, cache + scratch.slots[place] * slot_size + i, sizeof some);
      asm volatile("" : : "r"(some));  // or the compiler would leave it out
    }
}

// Add places [from, to) of the chunk at `origin`, whose slots scratch holds, for lanes that see a key up to `last`.
template <class T>
void reduce_chunk(const Attention<T>& job, const Block& block, int64_t head, int64_t origin, int64_t from, int64_t to,
                  I16 last, Lanes& lanes, Scratch& scratch) {
  chunk_scores(job, block, head, from / 16 * 16, to, scratch, scratch.scores);
  weigh(job, block, origin, from, to, last, lanes, scratch);
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2) {
    if (use_tiles(job)) {
      add_values_tiles(job.value_cache + head * job.value_size, job.num_heads * job.value_size, job.value_size, from, to,
                       scratch);
      return;
    }
  }
#endif
  scratch.parts.assign(scratch.sums.size(), 0.0f);
  add_values(job, head, from, to, 0, block.num_queries, scratch.scores, scratch);
  add_parts(scratch);
}

// Lanes whose keys are in the same slots.
struct Path {
  int64_t row = -1;              // the tree's row; -1: all rows whose keys are in order
  int first = kLanes, stop = 0;  // its lanes are among [first, stop)
  I16 last = splat(-1);          // the position of each of its lanes, -1 for the others
  int64_t end = 0;               // the positions they see end before it
};

// visit(path) for the rows in order together, then for each other row of the block by itself.
template <class T, class Visit>
void for_each_path(const Attention<T>& job, const Block& block, const Lanes& lanes, Visit visit) {
  const int64_t begin_row = block.row(0, job.group), end_row = block.row(block.num_queries - 1, job.group) + 1;
  for (int64_t row = begin_row - 1; row < end_row; ++row) {
    Path path;
    if (row >= begin_row) {
      if (!job.rows.path_length(row)) continue;
      path.row = row;
    }
    for (int i = 0; i < block.num_queries; ++i) {
      const int64_t own = block.row(i, job.group);
      if (path.row < 0 ? job.rows.path_length(own) > 0 : own != path.row) continue;
      path.first = std::min(path.first, i);
      path.stop = i + 1;
      path.last.set(i, lanes.last[i]);
      path.end = std::max<int64_t>(path.end, lanes.last[i] + 1);
    }
    if (path.stop) visit(path);
  }
}

template <class T>
void find_slots_of(const Attention<T>& job, const Block& block, const Path& path, int64_t begin, int64_t end,
                   int64_t* slots) {
  const int32_t* pages = job.pages(block.segment);
  if (path.row < 0) find_slots(job, pages, begin, end, slots);
  else find_path_slots(job, pages, path.row, begin, end, slots);
}

#if defined(__AMX_BF16__)
// A chunk in which rows of the block part ways, on tiles: the whole of it for each path, with the other lanes blind.
template <class T>
void reduce_forked_tiles(const Attention<T>& job, const Block& block, int64_t head, int64_t origin, Lanes& lanes,
                         Scratch& scratch) {
  const int64_t from = std::max(lanes.begin, origin) - origin, aligned = from / 16 * 16;
  for_each_path(job, block, lanes, [&](const Path& path) {
    const int64_t to = std::min(path.end, origin + kChunk) - origin;
    if (to <= from) return;
    find_slots_of(job, block, path, origin + aligned, origin + to, scratch.slots + aligned);
    reduce_chunk(job, block, head, origin, from, to, path.last, lanes, scratch);
  });
}
#endif

// A chunk in which rows of the block diverge at place `fork`: the keys before it are common. Every lane has the sums
// of a chunk that is all its own: its scores are its path's, and values are added in the order of places.
template <class T>
void reduce_forked_chunk(const Attention<T>& job, const Block& block, int64_t head, int64_t origin, Lanes& lanes,
                         Scratch& scratch) {
#if defined(__AMX_BF16__)
  if (use_tiles(job)) return reduce_forked_tiles(job, block, head, origin, lanes, scratch);
#endif
  const int64_t from = std::max(lanes.begin, origin) - origin, to = std::min(lanes.stop, origin + kChunk) - origin;
  const int64_t fork = std::clamp(lanes.fork - origin, from, to);
  find_slots(job, job.pages(block.segment), origin + from, origin + fork, scratch.slots + from);
  chunk_scores(job, block, head, from, fork, scratch, scratch.scores);
  const auto with_own_places = [&](auto visit) {
    for_each_path(job, block, lanes, [&](const Path& path) {
      const int64_t end = std::min(path.end, origin + kChunk) - origin;
      if (end <= fork) return;
      find_slots_of(job, block, path, origin + fork, origin + end, scratch.slots + fork);
      visit(path, end);
    });
  };
  with_own_places([&](const Path& path, int64_t end) {
    chunk_scores(job, block, head, fork, end, scratch, scratch.branch);
    for (int64_t place = fork; place < end; ++place)
      store16(scratch.scores[place],
              select(path.last >= 0, load16(scratch.branch[place]), load16(scratch.scores[place])));
  });
  weigh(job, block, origin, from, to, lanes.last, lanes, scratch);
  scratch.parts.assign(scratch.sums.size(), 0.0f);
  add_values(job, head, from, fork, 0, block.num_queries, scratch.scores, scratch);
  with_own_places([&](const Path& path, int64_t end) {
    for (int64_t place = fork; place < end; ++place)
      store16(scratch.branch[place], select(path.last >= 0, load16(scratch.scores[place]), F16{}));
    add_values(job, head, fork, end, path.first, path.stop, scratch.branch, scratch);
  });
  add_parts(scratch);
}

template <class T>
void write_results(const Attention<T>& job, const Block& block, int64_t head, const Lanes& lanes, Scratch& scratch) {
  const int64_t width = padded_width(job);
  for (int i = 0; i < block.num_queries; ++i) {
    T* to = job.out.at(block.row(i, job.group), head * job.group + (block.first_query + i) % job.group);
    for (int64_t d = 0; d < job.value_size; d += kLanes) {
      const F16 result = load16(&scratch.sums[i * width + d]) / lanes.total[i];
      if (d + kLanes <= job.value_size) {
        store16(to + d, result);
      } else {
        T tail[kLanes];
        store16(tail, result);
        std::memcpy(to + d, tail, sizeof(T) * (job.value_size - d));
      }
    }
  }
}

template <class T>
void attend_block(const Attention<T>& job, const Block& block, int64_t head, Scratch& scratch) {
  const int32_t* pages = job.pages(block.segment);
  scratch.sums.assign(kLanes * padded_width(job), 0.0f);
  Lanes lanes = load_queries(job, block, head, scratch);
  for (int64_t origin = lanes.begin / kChunk * kChunk; origin < lanes.stop; origin += kChunk) {
    if (lanes.fork < origin + kChunk) {
      reduce_forked_chunk(job, block, head, origin, lanes, scratch);
      continue;
    }
    const int64_t from = std::max(lanes.begin, origin) - origin, to = std::min(lanes.stop, origin + kChunk) - origin;
    const int64_t aligned = from / 16 * 16;  // tiles take 16 slots at a time
    find_slots(job, pages, origin + aligned, origin + to, scratch.slots + aligned);
    if (head == 0 && block.first_query == 0) {  // the first block to come here
      read_through(job.key_cache, job.num_heads * job.key_size, from, to, scratch);
      read_through(job.value_cache, job.num_heads * job.value_size, from, to, scratch);
    }
    reduce_chunk(job, block, head, origin, from, to, lanes.last, lanes, scratch);
  }
  if (job.sinks) add_sinks(job, block, head, lanes, scratch);
  write_results(job, block, head, lanes, scratch);
}

template <class T>
void attention(const Attention<T>& job) {
  if (job.key.data) write_rows(job);
  std::vector<Block> blocks;
  for (int64_t row = 0; row < job.rows.num_rows;) {
    const int32_t segment = job.rows.row_segments[row];
    int64_t end = row;
    while (end < job.rows.num_rows && job.rows.row_segments[end] == segment) ++end;
    const int64_t num_queries = (end - row) * job.group;
    for (int64_t query = 0; query < num_queries; query += kLanes)
      blocks.push_back({segment, int32_t(row), int32_t(query), int32_t(std::min<int64_t>(kLanes, num_queries - query))});
    row = end;
  }
  auto body = [&](int task) {
    static thread_local Scratch scratch;
#if defined(__AMX_BF16__)
    if (use_tiles(job)) configure_tiles();
#endif
    attend_block(job, blocks[task / job.num_heads], task % job.num_heads, scratch);
#if defined(__AMX_BF16__)
    if (use_tiles(job)) _tile_release();
#endif
  };
  parallel(int(blocks.size() * job.num_heads), body);
}

}  // namespace betoken

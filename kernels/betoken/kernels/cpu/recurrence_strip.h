// A head's recurrence over a strip of its state's columns, which do not know each other.
//
// Rows are applied one after the other, in one order of sums. What differs from a loop over rows is when memory is read:
// without the delta rule a few rows of the state stay in registers while many tokens pass; with it, the pass that writes a
// token sums the next one, too.
#pragma once
#include <cmath>
#include <type_traits>

#include "recurrence.h"
#include "recurrent_lanes.h"

namespace betoken {

constexpr int64_t kStrip = 64;  // columns of a task
constexpr int64_t kTokens = 16;  // whose inputs are at hand
constexpr int kTileRows = 4;  // rows of the state in registers
constexpr int kWide = kNative == 16 ? 4 : 1;  // adjacent groups of 16 columns, limited by the number of registers

// A token's inputs in float32, padded to whole lanes.
struct TokenInputs {
  float *key, *query, *decay;  // [D]: of length 1 and scaled, as the rule wants
  float *written;  // [strip]: the value, and what is written of it
  float *steps;  // [strip], with rates
  float *out;  // [strip]
  float beta;
};

template <class T>
class RecurrentStrip {
 public:
  RecurrentStrip(const Recurrence<T>& job, int64_t segment, int64_t head, int64_t column, std::vector<float>& memory)
      : job_(job),
        head_(head),
        key_head_(head / (job.num_heads / job.num_key_heads)),
        column_(column),
        width_(std::min(kStrip, job.value_size - column)),
        padded_(padded_size(width_)),
        key_room_(padded_size(job.key_size)),
        kept_(job.state + ((int64_t(job.rows->states[segment]) * job.num_heads + head) * job.key_size) * job.value_size +
              column),
        kept_stride_(job.value_size) {
    const int64_t size = job.key_size * padded_, token = 3 * key_room_ + 3 * padded_;
    memory.resize(2 * size + kTokens * token + padded_);
    own_ = memory.data();
    staged_ = own_ + size;
    sums_ = staged_ + size;
    float* at = sums_ + padded_;
    for (TokenInputs& inputs : tokens_) {
      inputs = {at, at + key_room_, at + 2 * key_room_, at + 3 * key_room_, at + 3 * key_room_ + padded_,
                at + 3 * key_room_ + 2 * padded_, 0.0f};
      at += token;
    }
  }

  void run(const Advance* begin, const Advance* end, bool is_new) {
    if (begin == end) return;
    float* const state = kept_;
    const bool is_staged = padded_ != width_;
    if (is_staged) {  // whole lanes would reach beyond the columns
      kept_ = staged_;
      kept_stride_ = padded_;
      std::fill(staged_, staged_ + job_.key_size * padded_, 0.0f);
      for (int64_t d = 0; !is_new && d < job_.key_size; ++d)
        std::memcpy(staged_ + d * padded_, state + d * job_.value_size, sizeof(float) * width_);
    } else if (is_new) {
      for (int64_t d = 0; d < job_.key_size; ++d) std::fill_n(kept_ + d * kept_stride_, width_, 0.0f);
    }
    if (job_.is_delta) run_delta(begin, end);
    else run_tiles(begin, end);
    if (!is_staged) return;
    for (int64_t d = 0; d < job_.key_size; ++d)
      std::memcpy(state + d * job_.value_size, staged_ + d * padded_, sizeof(float) * width_);
  }

 private:
  // Rules without the delta: a tile of the state in registers, which the tokens pass one after the other.
  void run_tiles(const Advance* begin, const Advance* end) {
    for (; begin < end; begin += kTokens) {
      const int num = int(std::min<int64_t>(kTokens, end - begin));
      for (int i = 0; i < num; ++i) prepare(begin[i], tokens_[i]);
      const bool goes_on = begin + num < end && !begin[num].restarts;
      for (int64_t e = 0; e < padded_;) {
        if (kWide > 1 && padded_ - e >= kWide * kLanes) {
          tiles_at<kWide>(begin, num, e, goes_on);
          e += kWide * kLanes;
        } else {
          tiles_at<1>(begin, num, e, goes_on);
          e += kLanes;
        }
      }
      for (int i = 0; i < num; ++i) give(begin[i], tokens_[i]);
    }
  }

  template <int kColumns>
  void tiles_at(const Advance* advances, int num, int64_t e, bool goes_on) {
    if (job_.rates) return tiles_of<kColumns, 1, true>(advances, num, e, goes_on, 0);
    const int64_t whole = job_.key_size / kTileRows * kTileRows;
    tiles_of<kColumns, kTileRows, false>(advances, num, e, goes_on, 0);
    tiles_of<kColumns, 1, false>(advances, num, e, goes_on, whole);
  }

  template <int kColumns, int kRows, bool kHasRates>
  void tiles_of(const Advance* advances, int num, int64_t e, bool goes_on, int64_t first) {
    for (int64_t d = first; d + kRows <= job_.key_size; d += kRows) {
      F16 state[kRows][kColumns], rates[kRows][kColumns];
      if constexpr (kHasRates) load_rates(rates, d, e);
      if (!advances[0].restarts) move<true>(state, own_ + d * padded_ + e, padded_);
      for (int i = 0; i < num; ++i) {
        const TokenInputs& inputs = tokens_[i];
        if (advances[i].restarts) move<true>(state, kept_ + d * kept_stride_ + e, kept_stride_);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const F16 decay = splat(inputs.decay[d + row]), key = splat(inputs.key[d + row]);
#pragma GCC unroll 4
          for (int c = 0; c < kColumns; ++c) {
            const int64_t at = e + c * kLanes;
            F16 faded;
            if constexpr (kHasRates) faded = state[row][c] * exp16(rates[row][c] * load16(inputs.steps + at));
            else faded = state[row][c] * decay;
            state[row][c] = fused(key, load16(inputs.written + at), faded);
          }
        }
        if (advances[i].reads >= 0) read(state, inputs, d, e);
        if (advances[i].commits) move<false>(state, kept_ + d * kept_stride_ + e, kept_stride_);
      }
      if (goes_on) move<false>(state, own_ + d * padded_ + e, padded_);
    }
  }

  template <int kRows, int kColumns>
  [[gnu::always_inline]] void read(const F16 (&state)[kRows][kColumns], const TokenInputs& inputs, int64_t d, int64_t e) {
    F16 sums[1][kColumns];
    move<true>(sums, inputs.out + e, 0);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const F16 query = splat(inputs.query[d + row]);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sums[0][c] = fused(state[row][c], query, sums[0][c]);
    }
    move<false>(sums, inputs.out + e, 0);
  }

  // A tile from memory, or back.
  template <bool kLoads, int kRows, int kColumns>
  [[gnu::always_inline]] static void move(F16 (&tile)[kRows][kColumns], float* memory, int64_t stride) {
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        if constexpr (kLoads) tile[row][c] = load16(memory + row * stride + c * kLanes);
        else store16(memory + row * stride + c * kLanes, tile[row][c]);
      }
  }

  template <int kColumns>
  void load_rates(F16 (&rates)[1][kColumns], int64_t d, int64_t e) {
    const float* from = job_.rates + (head_ * job_.key_size + d) * job_.value_size + column_;
    for (int c = 0; c < kColumns; ++c) rates[0][c] = load_some(from + e + c * kLanes, width_ - e - c * kLanes);
  }

  // The delta rule: what the state holds under a key is known before anything is written.
  void run_delta(const Advance* begin, const Advance* end) {
    const float* now = kept_;
    int64_t stride = kept_stride_;
    prepare(*begin, tokens_[0]);
    for (const Advance* advance = begin; advance < end; ++advance) {
      TokenInputs &inputs = tokens_[(advance - begin) % 2], &next = tokens_[(advance - begin + 1) % 2];
      if (advance->restarts) {
        now = kept_;
        stride = kept_stride_;
        by_columns([&](auto columns, int64_t e) { sum<columns.value>(now, stride, inputs, e); });
      }
      for (int64_t e = 0; e < padded_; e += kLanes)
        store16(inputs.written + e, (load16(inputs.written + e) - load16(sums_ + e)) * inputs.beta);
      const bool goes_on = advance + 1 < end && !advance[1].restarts;
      if (advance + 1 < end) prepare(advance[1], next);
      float* to = advance->commits ? kept_ : own_;
      const int64_t to_stride = advance->commits ? kept_stride_ : padded_;
      by_columns([&](auto columns, int64_t e) {
        if (goes_on) write<columns.value, true>(now, stride, to, to_stride, inputs, next, e);
        else write<columns.value, false>(now, stride, to, to_stride, inputs, next, e);
      });
      give(*advance, inputs);
      now = to;
      stride = to_stride;
    }
  }

  template <class Body>
  void by_columns(Body body) {
    int64_t e = 0;
    if constexpr (kWide > 1)
      for (; padded_ - e >= kWide * kLanes; e += kWide * kLanes) body(std::integral_constant<int, kWide>{}, e);
    for (; e < padded_; e += kLanes) body(std::integral_constant<int, 1>{}, e);
  }

  template <int kColumns>
  void sum(const float* state, int64_t stride, const TokenInputs& inputs, int64_t e) {
    F16 sums[1][kColumns] = {};
    for (int64_t d = 0; d < job_.key_size; ++d) {
      const F16 decay = splat(inputs.decay[d]), key = splat(inputs.key[d]);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c)
        sums[0][c] = fused(load16(state + d * stride + e + c * kLanes) * decay, key, sums[0][c]);
    }
    move<false>(sums, sums_ + e, 0);
  }

  // Write a token, read its output and, if the next one goes on from here, sum what is then held under its key.
  template <int kColumns, bool kGoesOn>
  void write(const float* from, int64_t stride, float* to, int64_t to_stride, const TokenInputs& inputs,
             const TokenInputs& next, int64_t e) {
    F16 written[1][kColumns], out[1][kColumns] = {}, sums[1][kColumns] = {};
    move<true>(written, inputs.written + e, 0);
    for (int64_t d = 0; d < job_.key_size; ++d) {
      const F16 decay = splat(inputs.decay[d]), key = splat(inputs.key[d]), query = splat(inputs.query[d]);
      F16 next_decay, next_key;
      if constexpr (kGoesOn) {
        next_decay = splat(next.decay[d]);
        next_key = splat(next.key[d]);
      }
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        const F16 faded = load16(from + d * stride + e + c * kLanes) * decay;
        const F16 state = fused(key, written[0][c], faded);
        store16(to + d * to_stride + e + c * kLanes, state);
        out[0][c] = fused(state, query, out[0][c]);
        if constexpr (kGoesOn) sums[0][c] = fused(state * next_decay, next_key, sums[0][c]);
      }
    }
    move<false>(out, inputs.out + e, 0);
    if constexpr (kGoesOn) move<false>(sums, sums_ + e, 0);
  }

  void prepare(const Advance& advance, TokenInputs& inputs) {
    const int64_t at = advance.at;
    const bool is_row = advance.is_row;
    const T* key = is_row ? job_.key + at * job_.key_pitch : job_.waiting_keys + at * job_.key_width();
    const T* value = is_row ? job_.value + at * job_.value_pitch : job_.waiting_values + at * job_.value_width();
    const float* gates = (is_row ? job_.gates : job_.waiting_gates) + at * job_.gate_width() + head_ * job_.gate_size;
    direct(key, 1.0f, inputs.key);
    if (advance.reads >= 0) direct(job_.query + at * job_.query_pitch, job_.scale, inputs.query);
    else std::fill(inputs.query, inputs.query + job_.key_size, 0.0f);
    std::fill(inputs.out, inputs.out + padded_, 0.0f);
    if (!job_.rates) fade(gates, inputs);
    const float* steps = gates + column_;
    value += head_ * job_.value_size + column_;
    for (int64_t e = 0; e < padded_; e += kLanes) {
      const int64_t num = width_ - e;
      F16 written = load_some(value + e, num);
      if (job_.rates) {
        const F16 step = load_some(steps + e, num);
        store16(inputs.steps + e, step);
        if (job_.weighs) written = written * step;
      } else if (!job_.is_delta) {
        written = written * inputs.beta;
      }
      store16(inputs.written + e, written);
    }
  }

  void fade(const float* gates, TokenInputs& inputs) {
    const int64_t num_decays = job_.gate_size - 1;
    inputs.beta = gates[num_decays];
    if (num_decays == 1) {
      std::fill(inputs.decay, inputs.decay + job_.key_size, exp16(splat(gates[0]))[0]);
      return;
    }
    for (int64_t d = 0; d < num_decays; d += kLanes)
      store16(inputs.decay + d, exp16(load_some(gates + d, num_decays - d)));
  }

  // The head's vector of [G, D], perhaps over its length, times a factor.
  void direct(const T* vectors, float factor, float* to) {
    const T* vector = vectors + key_head_ * job_.key_size;
    F16 squares{};
    for (int64_t d = 0; d < job_.key_size; d += kLanes) {
      const F16 numbers = load_some(vector + d, job_.key_size - d);
      if (job_.normalizes) squares = fused(numbers, numbers, squares);
      store16(to + d, numbers);
    }
    if (job_.normalizes) {
      const float length = 1.0f / std::sqrt(sum_lanes(squares) + 1e-6f);
      for (int64_t d = 0; d < job_.key_size; d += kLanes) store16(to + d, load16(to + d) * length * factor);
    } else if (factor != 1.0f) {
      for (int64_t d = 0; d < job_.key_size; d += kLanes) store16(to + d, load16(to + d) * factor);
    }
  }

  void give(const Advance& advance, const TokenInputs& inputs) {
    if (advance.reads < 0) return;
    float* out = job_.out + advance.reads * job_.value_width() + head_ * job_.value_size + column_;
    std::memcpy(out, inputs.out, sizeof(float) * width_);
  }

  const Recurrence<T>& job_;
  const int64_t head_, key_head_, column_, width_, padded_, key_room_;
  float* kept_;  // [D, kept_stride]: the committed state's strip
  int64_t kept_stride_;
  float *own_, *staged_;  // [D, strip]: the state of rows after the committed ones; the committed one in whole lanes
  float* sums_;  // [strip]: what is held under the next token's key
  TokenInputs tokens_[kTokens];
};

}  // namespace betoken

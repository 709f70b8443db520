/* CPU kernels of noise, logits adjustment and sampling, bit for bit the torch references of the same names.
 *
 * Compile with -ffp-contract=off and without -ffast-math: every float operation below must round once, as IEEE 754 says.
 * Rows are independent of each other; nothing here allocates, keeps state or knows sequences.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 256          /* Philox calls per group of 1024 vocabulary ids */
#define GROUP (4 * LANES)  /* id v takes word (v >> 8) & 3 of call (v >> 10) << 8 | (v & 255) */
#define BLOCK 64           /* ids looked at together: most blocks hold none that is sought */

static inline uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* float_math.log */
static inline float log_f32(float x) {
    uint32_t shifted = bits_of(x) + (0x3F800000u - 0x3F3504F3u);
    float e = (float)((int32_t)(shifted >> 23) - 127);
    float f = float_of((shifted & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f;
    float square = f * f;
    float y = f * 7.0376836292e-2f;
    y = (y + -1.1514610310e-1f) * f;
    y = (y + 1.1676998740e-1f) * f;
    y = (y + -1.2420140846e-1f) * f;
    y = (y + 1.4249322787e-1f) * f;
    y = (y + -1.6668057665e-1f) * f;
    y = (y + 2.0000714765e-1f) * f;
    y = (y + -2.4999993993e-1f) * f;
    y = (y + 3.3333331174e-1f) * f * square;
    y = y + e * -2.12194440e-4f;
    y = y - square * 0.5f;
    return (f + y) + e * 0.693359375f;
}

/* float_math.exp, x <= 0 */
static inline float exp_f32(float x) {
    float clamped = x < -87.0f ? -87.0f : x;
    float n = floorf(clamped * 1.44269504088896341f + 0.5f);
    float r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float y = r * 1.9875691500e-4f;
    y = (y + 1.3981999507e-3f) * r;
    y = (y + 8.3334519073e-3f) * r;
    y = (y + 4.1665795894e-2f) * r;
    y = (y + 1.6666665459e-1f) * r;
    y = (y + 5.0000001201e-1f) * (r * r) + r + 1.0f;
    float scaled = y * float_of((uint32_t)((int32_t)n + 127) << 23);
    return x < -87.0f ? 0.0f : scaled;
}

/* noise.to_gumbel */
static inline float gumbel_of(uint32_t word) {
    float u = (float)word * 0x1p-32f + 0x1p-33f;
    float small = ((u / 3.0f + 0.5f) * u + 1.0f) * u;
    float bounded = u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
    float large = -log_f32(1.0f - bounded);
    return -log_f32(u < 0x1p-7f ? small : large);
}

#define LARGEST_GUMBEL 22.9f

/* At least gumbel_of(word), from the exponent of u = word * 2^-32 alone: -log(-log(1 - u)) is at most -log(u). */
static inline float gumbel_bound(uint32_t word) {
    int32_t exponent = (int32_t)(bits_of((float)word) >> 23) - (127 + 32);
    return (float)-exponent * 0.69315f + 1e-3f;
}

/* noise.philox of LANES consecutive calls: out[word][call]. */
static void philox_lanes(uint64_t seed, uint32_t first_call, uint32_t position, uint32_t stream, uint32_t out[4][LANES]) {
    uint32_t k0[10], k1[10];
    for (int i = 0; i < 10; i++) {
        k0[i] = (uint32_t)seed + (uint32_t)i * 0x9E3779B9u;
        k1[i] = (uint32_t)(seed >> 32) + (uint32_t)i * 0xBB67AE85u;
    }
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t c0 = first_call + (uint32_t)lane, c1 = position, c2 = stream, c3 = 0;
#pragma GCC unroll 10
        for (int i = 0; i < 10; i++) {
            uint64_t product0 = (uint64_t)c0 * 0xD2511F53u, product2 = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(product2 >> 32) ^ c1 ^ k0[i];
            c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1[i];
            c1 = (uint32_t)product2;
            c3 = (uint32_t)product0;
        }
        out[0][lane] = c0, out[1][lane] = c1, out[2][lane] = c2, out[3][lane] = c3;
    }
}

/* One id's word. */
static uint32_t philox_one(uint64_t seed, uint32_t position, uint32_t stream, uint32_t id) {
    uint32_t c[4] = {(id >> 10) << 8 | (id & 255), position, stream, 0};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < 10; i++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t product0 = (uint64_t)c[0] * 0xD2511F53u, product2 = (uint64_t)c[2] * 0xCD9E8D57u;
        c[0] = (uint32_t)(product2 >> 32) ^ c[1] ^ k0;
        c[2] = (uint32_t)(product0 >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)product2;
        c[3] = (uint32_t)product0;
    }
    return c[(id >> 8) & 3];
}

/* Noise of ids [first, first + GROUP), first a multiple of GROUP. */
static void gumbel_group(uint64_t seed, uint32_t position, uint32_t stream, int64_t first, float noise[GROUP]) {
    uint32_t words[4][LANES];
    philox_lanes(seed, (uint32_t)(first / 4), position, stream, words);
    const uint32_t *flat = &words[0][0];
    for (int i = 0; i < GROUP; i++) noise[i] = gumbel_of(flat[i]);
}

/* noise.gumbel: out [R, V] */
void betoken_gumbel(int64_t num_rows, int64_t vocab_size, const int64_t *seeds, const int64_t *positions,
                      uint32_t stream, float *out) {
    float noise[GROUP];
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t first = 0; first < vocab_size; first += GROUP) {
            int64_t count = vocab_size - first < GROUP ? vocab_size - first : GROUP;
            gumbel_group((uint64_t)seeds[row], (uint32_t)positions[row], stream, first, noise);
            memcpy(out + row * vocab_size + first, noise, (size_t)count * sizeof(float));
        }
    }
}

#define MAXIMA 64

/* Largest of n floats, NaN if any is. Many running maxima, so that the compiler vectorises without reordering rules. */
static float largest_of(const float *x, int64_t n) {
    float lanes[MAXIMA];
    int32_t has_nan[MAXIMA] = {0};
    for (int j = 0; j < MAXIMA; j++) lanes[j] = -INFINITY;
    int64_t i = 0;
    for (; i + MAXIMA <= n; i += MAXIMA)
        for (int j = 0; j < MAXIMA; j++) {
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
            has_nan[j] |= x[i + j] != x[i + j];
        }
    for (; i < n; i++) {
        lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
        has_nan[0] |= x[i] != x[i];
    }
    for (int j = 1; j < MAXIMA; j++) {
        lanes[0] = lanes[j] > lanes[0] ? lanes[j] : lanes[0];
        has_nan[0] |= has_nan[j];
    }
    return has_nan[0] ? NAN : lanes[0];
}

static int64_t first_equal(const float *x, int64_t n, float value) {
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        int32_t is_found = 0;
        for (int j = 0; j < BLOCK; j++) is_found |= x[i + j] == value;
        if (is_found) break;
    }
    for (; i < n; i++)
        if (x[i] == value) return i;
    return 0;
}

/* Unsigned integers in the order of the floats they stand for. */
static inline uint32_t key_of(float x) {
    uint32_t b = bits_of(x);
    return b ^ ((uint32_t)((int32_t)b >> 31) | 0x80000000u);
}

static inline float float_of_key(uint32_t key) {
    return float_of(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/* The smallest key that is kept when keys are kept, from the largest down, while the weight above them is less than
 * `bound`, which all together reach: the largest that still has it at or above. Found bit by bit: a pass over the keys
 * is a few vectors. Weights NULL counts 1 each. */
static uint32_t rank_threshold(const uint32_t *keys, const int64_t *weights, int64_t n, double bound) {
    uint32_t threshold = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t trial = threshold | (uint32_t)1 << bit;
        int64_t weight = 0;
        int32_t count = 0;
        if (weights)
            for (int64_t i = 0; i < n; i++) weight += keys[i] >= trial ? weights[i] : 0;
        else
            for (int64_t i = 0; i < n; i++) count += keys[i] >= trial;
        if ((double)(weights ? weight : count) >= bound) threshold = trial;
    }
    return threshold;
}

static float top_k_threshold(const float *scaled, int64_t n, int32_t top_k, uint32_t *keys) {
    float least = -INFINITY;
    int64_t num_candidates = 0;
    if (top_k <= LANES && n > LANES) { /* top_k ids at least reach the top_k-th of the largest of every LANES-th id */
        float largest[LANES];
        memcpy(largest, scaled, sizeof largest);
        for (int64_t first = LANES; first + LANES <= n; first += LANES)
            for (int lane = 0; lane < LANES; lane++)
                largest[lane] = scaled[first + lane] > largest[lane] ? scaled[first + lane] : largest[lane];
        for (int lane = 0; lane < LANES; lane++) keys[lane] = key_of(largest[lane]);
        least = float_of_key(rank_threshold(keys, NULL, LANES, (double)top_k));
    }
    for (int64_t block = 0; block < n; block += BLOCK) {
        int64_t stop = n - block < BLOCK ? n : block + BLOCK;
        int has_any = 0;
        for (int64_t i = block; i < stop; i++) has_any |= scaled[i] >= least;
        for (int64_t i = block; i < stop && has_any; i++) {
            keys[num_candidates] = key_of(scaled[i]);
            num_candidates += scaled[i] >= least;
        }
    }
    return float_of_key(rank_threshold(keys, NULL, num_candidates, (double)top_k));
}

/* `threshold` comes from top_k: lower logits have no weight. */
static float top_p_threshold(const float *scaled, const float *likelihood, int64_t n, float threshold, float top_p,
                             uint32_t *keys, int64_t *weights) {
    int64_t total = 0, num_candidates = 0;
    for (int64_t i = 0; i < n; i++) {
        weights[i] = scaled[i] >= threshold ? (int64_t)(likelihood[i] * 0x1p40f) : 0;
        total += weights[i];
    }
    double bound = (double)top_p * (double)total;
    /* Ids lighter than this hold, all together, half of what top_p drops: none of them can stay. Nor can ids lighter
     * than a heavier limit if all ids up to its double together hold less than top_p drops. */
    int64_t lightest = (int64_t)(((double)total - bound) / (2.0 * (double)n));
    for (int64_t heavier = lightest * 64; heavier > lightest; heavier /= 4) {
        int64_t dropped = 0;
        for (int64_t i = 0; i < n; i++) dropped += weights[i] < 2 * heavier ? weights[i] : 0;
        if ((double)dropped < 0.999 * ((double)total - bound)) lightest = heavier;
    }
    for (int64_t block = 0; block < n; block += BLOCK) {
        int64_t stop = n - block < BLOCK ? n : block + BLOCK;
        int has_any = 0;
        for (int64_t i = block; i < stop; i++) has_any |= weights[i] >= lightest;
        for (int64_t i = block; i < stop && has_any; i++) {
            int64_t weight = weights[i];
            keys[num_candidates] = key_of(scaled[i]);
            weights[num_candidates] = weight;
            num_candidates += weight >= lightest; /* no branch: it would be mispredicted */
        }
    }
    return float_of_key(rank_threshold(keys, weights, num_candidates, bound));
}

/* The id of the largest logit + temperature * noise among the ids with scaled >= threshold and likelihood >= min_p
 * (likelihood NULL: no such filter). Most ids are out by a bound on their noise. */
static int64_t perturbed_argmax(const float *x, const float *scaled, float threshold, const float *likelihood,
                                float min_p, int64_t n, float temperature, uint64_t seed, uint32_t position) {
    int64_t best_id = 0;
    float best = -INFINITY, reach[GROUP]; /* what an id's score cannot exceed */
    uint32_t words[4][LANES];
    const uint32_t *flat = &words[0][0];
    for (int64_t first = 0; first < n; first += GROUP) {
        int64_t count = n - first < GROUP ? n - first : GROUP, num_kept = 0;
        for (int64_t i = 0; i < count; i++) {
            int is_kept = scaled[first + i] >= threshold && (!likelihood || likelihood[first + i] >= min_p);
            reach[i] = is_kept ? x[first + i] : -INFINITY;
            num_kept += is_kept;
        }
        if (num_kept == 0) continue;
        int is_dense = num_kept * 16 >= count; /* else words one by one */
        if (is_dense) philox_lanes(seed, (uint32_t)(first / 4), position, 0, words);
        for (int64_t i = 0; i < count; i++)
            reach[i] += temperature * (is_dense ? gumbel_bound(flat[i]) : LARGEST_GUMBEL);
        for (int64_t block = 0; block < count; block += BLOCK) {
            int64_t stop = count - block < BLOCK ? count : block + BLOCK;
            int may_win = 0;
            for (int64_t i = block; i < stop; i++) may_win |= reach[i] > best;
            for (int64_t i = block; i < stop && may_win; i++) {
                if (!(reach[i] > best)) continue;
                uint32_t word = is_dense ? flat[i] : philox_one(seed, position, 0, (uint32_t)(first + i));
                if (!(x[first + i] + temperature * gumbel_bound(word) > best)) continue;
                float score = x[first + i] + temperature * gumbel_of(word);
                if (score > best) best = score, best_id = first + i;
            }
        }
    }
    return best_id;
}

/* The smallest scaled logit that top_k and top_p leave. Fills scaled, and likelihood where top_p or min_p need it. */
static float filter_row(const float *x, int64_t n, float most, float temperature, int32_t top_k, float top_p,
                        float min_p, float *scaled, float *likelihood, uint32_t *keys, int64_t *weights) {
    for (int64_t i = 0; i < n; i++) scaled[i] = x[i] / temperature + 0.0f; /* + 0: one zero, so that keys tie */
    float threshold = -INFINITY, largest = most / temperature + 0.0f; /* of scaled too: division keeps the order */
    if (top_k > 0 && top_k < n) threshold = top_k_threshold(scaled, n, top_k, keys);
    if (top_p < 1.0f || min_p > 0.0f)
        for (int64_t i = 0; i < n; i++) likelihood[i] = exp_f32(scaled[i] - largest);
    if (top_p < 1.0f) {
        float other = top_p_threshold(scaled, likelihood, n, threshold, top_p, keys, weights);
        threshold = other > threshold ? other : threshold;
    }
    return threshold;
}

/* -1: x holds NaN, or its largest is not finite. */
static int64_t sample_row(const float *x, int64_t n, uint64_t seed, uint32_t position, float temperature, int32_t top_k,
                          float top_p, float min_p, float *scaled, float *likelihood, uint32_t *keys, int64_t *weights) {
    float largest = largest_of(x, n);
    if (!isfinite(largest)) return -1;
    if (!(temperature > 0.0f)) return first_equal(x, n, largest);
    float threshold = filter_row(x, n, largest, temperature, top_k, top_p, min_p, scaled, likelihood, keys, weights);
    return perturbed_argmax(x, scaled, threshold, min_p > 0.0f ? likelihood : NULL, min_p, n, temperature, seed, position);
}

/* What the row's token is the largest of, into scores: x + temperature * noise, -inf where perturbed_argmax would not
 * look. */
static void perturb_row(const float *x, const float *scaled, float threshold, const float *likelihood, float min_p,
                        int64_t n, float temperature, uint64_t seed, uint32_t position, float *scores) {
    float noise[GROUP];
    for (int64_t first = 0; first < n; first += GROUP) {
        int64_t count = n - first < GROUP ? n - first : GROUP, num_kept = 0;
        for (int64_t i = first; i < first + count; i++) num_kept += scaled[i] >= threshold;
        if (num_kept) gumbel_group(seed, position, 0, first, noise); /* likely ids are few, most groups have none */
        for (int64_t i = 0; i < count; i++) {
            int is_kept = scaled[first + i] >= threshold && (!likelihood || likelihood[first + i] >= min_p);
            scores[first + i] = is_kept ? x[first + i] + temperature * noise[i] : -INFINITY;
        }
    }
}

/* The num_top largest scores, the first of equals first; what is missing is id 0 with -inf. */
static void largest_ids(const float *scores, int64_t n, int64_t num_top, int64_t *ids, float *best) {
    for (int64_t i = 0; i < num_top; i++) ids[i] = 0, best[i] = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (!(scores[i] > best[num_top - 1])) continue;
        int64_t place = num_top - 1;
        for (; place > 0 && scores[i] > best[place - 1]; place--) best[place] = best[place - 1], ids[place] = ids[place - 1];
        best[place] = scores[i], ids[place] = i;
    }
}

/* Replaces the best scores by their log-softmax among all scores / scale: 0 at most. */
static void to_log_shares(const float *scores, int64_t n, float scale, int64_t num_top, float *best) {
    float lanes[16] = {0}, total = 0.0f, largest = best[0];
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lanes[j] += exp_f32((scores[i + j] - largest) / scale);
    for (; i < n; i++) lanes[0] += exp_f32((scores[i] - largest) / scale);
    for (int j = 0; j < 16; j++) total += lanes[j];
    float log_total = logf(total);
    for (int64_t k = 0; k < num_top; k++) {
        float share = (best[k] - largest) / scale - log_total;
        best[k] = share < 0.0f ? share : 0.0f;
    }
}

static void convert_bfloat16(const uint16_t *halves, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) out[i] = float_of((uint32_t)halves[i] << 16);
}

/* sample.sample: logits [R, V] float32 (is_bfloat16 = 0) or bfloat16 bits; scratch of 4 * V floats and V int64s. */
void betoken_sample(int64_t num_rows, int64_t vocab_size, const void *logits, int32_t is_bfloat16,
                      const int64_t *seeds, const int64_t *positions, const float *temperature, const int32_t *top_k,
                      const float *top_p, const float *min_p, float *scratch, int64_t *weights, int64_t *out) {
    float *converted = scratch, *scaled = scratch + vocab_size, *likelihood = scratch + 2 * vocab_size;
    uint32_t *keys = (uint32_t *)(scratch + 3 * vocab_size);
    for (int64_t row = 0; row < num_rows; row++) {
        const float *x = (const float *)logits + row * vocab_size;
        if (is_bfloat16) {
            convert_bfloat16((const uint16_t *)logits + row * vocab_size, vocab_size, converted);
            x = converted;
        }
        out[row] = sample_row(x, vocab_size, (uint64_t)seeds[row], (uint32_t)positions[row], temperature[row],
                              top_k[row], top_p[row], min_p[row], scaled, likelihood, keys, weights);
    }
}

/* sample.greedy: logits as betoken_sample; scratch of V floats. */
void betoken_greedy(int64_t num_rows, int64_t vocab_size, const void *logits, int32_t is_bfloat16, float *scratch,
                      int64_t *out) {
    for (int64_t row = 0; row < num_rows; row++) {
        const float *x = (const float *)logits + row * vocab_size;
        if (is_bfloat16) {
            convert_bfloat16((const uint16_t *)logits + row * vocab_size, vocab_size, scratch);
            x = scratch;
        }
        float largest = largest_of(x, vocab_size);
        out[row] = isfinite(largest) ? first_equal(x, vocab_size, largest) : -1;
    }
}

/* perturbed.perturbed_top: out [R, num_top] each; otherwise as betoken_sample, with one more V of floats in scratch. */
void betoken_perturbed_top(int64_t num_rows, int64_t vocab_size, int64_t num_top, float scale, const void *logits,
                             int32_t is_bfloat16, const int64_t *seeds, const int64_t *positions,
                             const float *temperature, const int32_t *top_k, const float *top_p, const float *min_p,
                             float *scratch, int64_t *weights, int64_t *ids, float *log_shares) {
    float *converted = scratch, *scaled = scratch + vocab_size, *likelihood = scratch + 2 * vocab_size;
    uint32_t *keys = (uint32_t *)(scratch + 3 * vocab_size);
    for (int64_t row = 0; row < num_rows; row++) {
        const float *x = (const float *)logits + row * vocab_size, *scores = x;
        if (is_bfloat16) {
            convert_bfloat16((const uint16_t *)logits + row * vocab_size, vocab_size, converted);
            scores = x = converted;
        }
        float largest = largest_of(x, vocab_size);
        if (temperature[row] > 0.0f && isfinite(largest)) {
            float *perturbed = scratch + 4 * vocab_size;
            float threshold = filter_row(x, vocab_size, largest, temperature[row], top_k[row], top_p[row], min_p[row],
                                         scaled, likelihood, keys, weights);
            perturb_row(x, scaled, threshold, min_p[row] > 0.0f ? likelihood : NULL, min_p[row], vocab_size,
                        temperature[row], (uint64_t)seeds[row], (uint32_t)positions[row], perturbed);
            scores = perturbed;
        }
        largest_ids(scores, vocab_size, num_top, ids + row * num_top, log_shares + row * num_top);
        to_log_shares(scores, vocab_size, scale, num_top, log_shares + row * num_top);
    }
}

/* logits_adjust.logits_adjust: logits [R, V] float32, changed in place by entries [row_offsets[r], row_offsets[r + 1]).
 * Returns 0, or -1 when an offset or an id is out of range: then nothing is changed. */
int32_t betoken_logits_adjust(int64_t num_rows, int64_t vocab_size, float *logits, const int64_t *row_offsets,
                                int64_t num_entries, const int64_t *ids, const float *bias, const float *scale,
                                const float *penalty, const uint32_t *allowed) {
    int64_t num_words = (vocab_size + 31) / 32;
    if (row_offsets[0] != 0 || row_offsets[num_rows] != num_entries) return -1;
    for (int64_t row = 0; row < num_rows; row++)
        if (row_offsets[row] > row_offsets[row + 1]) return -1;
    for (int64_t entry = 0; entry < num_entries; entry++)
        if (ids[entry] < 0 || ids[entry] >= vocab_size) return -1;
    for (int64_t row = 0; row < num_rows; row++) {
        float *y = logits + row * vocab_size;
        for (int64_t entry = row_offsets[row]; entry < row_offsets[row + 1]; entry++) {
            float value = y[ids[entry]] + bias[entry];
            y[ids[entry]] = (value < 0.0f ? value * scale[entry] : value / scale[entry]) - penalty[entry];
        }
        if (!allowed) continue;
        const uint32_t *words = allowed + row * num_words;
        for (int64_t i = 0; i < vocab_size; i++)
            if (!(words[i >> 5] >> (i & 31) & 1)) y[i] = -INFINITY;
    }
    return 0;
}

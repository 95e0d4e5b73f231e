// Draws a token per row as headrace_kernels.reference.draw and .noise define it, bit for bit, without fused multiply-add.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "team.h"
#include "vector.h"

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
constexpr float LARGEST_NOISE = 23.f;  // the definition's maximum is 22.9
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOW = -std::numeric_limits<float>::infinity();
constexpr int BLOCK = 256;       // entries whose largest is known: most blocks are left out by it
constexpr int64_t PIECE = 8192;  // entries per work item; a multiple of BLOCK
constexpr int FEW = 8;           // noise of one in so many entries is computed one by one, of more in vectors

inline uint64_t finalize(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline float bits_to_float(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline int32_t float_to_bits(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// x = (1 + f) * 2**e with 1 + f in [0.707, 1.414), for positive normal x.
inline void split(float x, float& f, float& e) {
    const int32_t bits = float_to_bits(x);
    const float mantissa = bits_to_float((bits & 0x007FFFFF) | 0x3F000000);  // [0.5, 1)
    const int32_t exponent = ((bits >> 23) & 0xFF) - 126;
    const bool low = mantissa < 0.70703125f;
    f = (low ? mantissa * 2.f : mantissa) - 1.f;
    e = (float)(low ? exponent - 1 : exponent);
}

inline float logarithm(float f, float e) {
    const float s = f / (f + 2.f);
    const float z = s * s;
    float series = z * (float)(1.0 / 9.0);
    series = z * (series + (float)(1.0 / 7.0));
    series = z * (series + (float)(1.0 / 5.0));
    series = z * (series + (float)(1.0 / 3.0));
    const float twice = s + s;
    return e * 0.6931471805599453f + (twice + twice * series);
}

inline float noise_of(uint32_t k) {
    float x = ((float)k + 0.5f) * 0x1p-32f;
    x = x < 1.f - 0x1p-24f ? x : 1.f - 0x1p-24f;
    const bool near = x < 0.25f;
    float f, e;
    split(1.f - x, f, e);
    const float exponential = -logarithm(near ? -x : f, near ? 0.f : e);
    split(exponential, f, e);
    return -logarithm(f, e);
}

inline float noise_at(uint64_t key, int64_t index) {
    return noise_of((uint32_t)(finalize(key + GOLDEN * (uint64_t)(index + 1)) >> 32));
}

void fill(float* out, uint64_t key, int64_t first, int count) {
    for (int i = 0; i < count; i++) out[i] = noise_at(key, first + i);
}

// Floor of 2**40 * 2**power, power at most 0, in two parts of 20 bits: vectors have no 64-bit integers.
inline void weigh(float power, int32_t& high, int32_t& low) {
    power = power > -64.f ? power : -64.f;
    const float shifted = power + 12582912.f;  // steps of 1: rounds to the nearest, ties to even
    const int32_t whole = float_to_bits(shifted) - 0x4B400000;
    const float rest = power - (shifted - 12582912.f);
    float series = 0.009570100344717503f;
    series = series * rest + 0.05591785907745361f;
    series = series * rest + 0.240247443318367f;
    series = series * rest + 0.6931217908859253f;
    series = series * rest + 0.9999992847442627f;
    const float weight = bits_to_float(float_to_bits(series) + (whole + 40) * (1 << 23));
    high = (int32_t)(weight * 0x1p-20f);
    low = (int32_t)(weight - (float)high * 0x1p20f);
}

struct Best {
    float score;
    int64_t index;
};

// One row. `peaks`: of its blocks.
struct Row {
    const float* logits;
    float* peaks;
    int64_t vocab, blocks;
    uint64_t key;
    float temperature, top_p, log_min_p;
    int64_t top_k;

    bool truncates() const { return temperature > 0.f && (top_k > 0 || top_p < 1.f || log_min_p > LOW); }

    int count(int64_t block) const { return (int)std::min<int64_t>(BLOCK, vocab - block * BLOCK); }

    // The largest of each block; infinity in place of NaN.
    void fill_peaks(int64_t from, int64_t to) {
        for (int64_t b = from; b < to; b++) {
            const float* x = logits + b * BLOCK;
            float peak = LOW;
            int32_t numbers = -1;
#pragma omp simd reduction(max : peak) reduction(& : numbers)
            for (int i = 0; i < count(b); i++) {
                peak = x[i] > peak ? x[i] : peak;
                numbers &= x[i] == x[i] ? -1 : 0;
            }
            peaks[b] = numbers ? peak : std::numeric_limits<float>::infinity();
        }
    }

    // The best of the logits in some blocks, with noise unless the temperature is 0: of those from `least` on and above `value`.
    Best best_of(int64_t from, int64_t to, float least, float value) const {
        Best best{LOW, from * BLOCK};
        float scores[BLOCK];
        const float divisor = temperature > 0.f ? temperature : 1.f;
        for (int64_t b = from; b < to; b++) {
            if (!(peaks[b] / divisor + (temperature > 0.f ? LARGEST_NOISE : 0.f) > best.score)) continue;
            if (!(peaks[b] >= least && peaks[b] > value)) continue;
            const float* x = logits + b * BLOCK;
            const int n = count(b);
            int kept = 0;
#pragma omp simd reduction(+ : kept)
            for (int i = 0; i < n; i++) kept += x[i] >= least && x[i] > value;
            if (temperature > 0.f && kept > n / FEW) fill(scores, key, b * BLOCK, n);
            else
                for (int i = 0; i < n; i++)
                    scores[i] = temperature > 0.f && x[i] >= least && x[i] > value ? noise_at(key, b * BLOCK + i) : 0.f;
            float highest = LOW;
#pragma omp simd reduction(max : highest)
            for (int i = 0; i < n; i++) {
                scores[i] = x[i] >= least && x[i] > value ? x[i] / divisor + scores[i] : LOW;
                highest = scores[i] > highest ? scores[i] : highest;
            }
            if (!(highest > best.score)) continue;
            best = {highest, b * BLOCK + (std::find(scores, scores + n, highest) - scores)};
        }
        return best;
    }

    // The k-th largest logit: those from the k-th largest peak of a block on include it.
    float kth_largest() const {
        std::vector<float> found;
        float bound = LOW;
        if (top_k <= blocks) {
            found.assign(peaks, peaks + blocks);
            std::nth_element(found.begin(), found.begin() + (top_k - 1), found.end(), std::greater<float>());
            bound = found[top_k - 1];
            found.clear();
        }
        for (int64_t b = 0; b < blocks; b++)
            if (peaks[b] >= bound)
                std::copy_if(logits + b * BLOCK, logits + b * BLOCK + count(b), std::back_inserter(found),
                             [&](float x) { return x >= bound; });
        std::nth_element(found.begin(), found.begin() + (top_k - 1), found.end(), std::greater<float>());
        return found[top_k - 1];
    }

    // The mass of the logits from `least` on that are above `value`.
    int64_t mass(float peak, float least, float value) const {
        const float scale = LOG2E / temperature;
        int64_t total = 0;
        for (int64_t b = 0; b < blocks; b++) {
            if (peaks[b] < least || !(peaks[b] > value) || (peaks[b] - peak) * scale < -42.f) continue;
            const float* x = logits + b * BLOCK;
            int32_t high_sum = 0, low_sum = 0;
#pragma omp simd reduction(+ : high_sum, low_sum)
            for (int i = 0; i < count(b); i++) {
                int32_t high, low;
                weigh((x[i] - peak) * scale, high, low);
                const int32_t kept = x[i] >= least && x[i] > value ? -1 : 0;
                high_sum += high & kept, low_sum += low & kept;
            }
            total += ((int64_t)high_sum << 20) + low_sum;
        }
        return total;
    }

    // The token of a row with top_k, top_p or min_p: a draw among more logits than are kept, and above what it gives until that
    // is kept.
    int64_t truncated() const {
        const float peak = *std::max_element(peaks, peaks + blocks);
        float least = LOW;
        if (log_min_p > LOW) least = peak + temperature * log_min_p;
        if (top_k > 0 && top_k < vocab) least = std::max(least, kth_largest());
        if (top_p >= 1.f) return best_of(0, blocks, least, LOW).index;
        const double total = (double)mass(peak, least, LOW), within = (double)top_p * total;
        // All logits of less than this mass together have less than 1 - top_p: none is kept.
        const double lightest = 0.99 * (1.0 - (double)top_p) * total / (double)vocab;
        const float below = (float)(40.0 - std::log2(lightest)) * temperature / LOG2E + std::abs(peak) * 1e-6f;
        const float from = std::max(least, peak - below);
        Best best = best_of(0, blocks, from, LOW);
        for (;;) {
            const float value = logits[best.index];
            const int64_t above = value >= peak ? 0 : mass(peak, least, value);
            if (above == 0 || (double)above < within) return best.index;
            best = best_of(0, blocks, from, value);
        }
    }
};

}  // namespace

// logits: [count, vocab], rows `stride` apart. numbers: temperature, top_p and log(min_p) of each row number. integers: noise key
// and top_k.
extern "C" void headrace_draw(int64_t* tokens, float* peaks, const float* logits, int64_t stride, const int64_t* rows,
                              const int64_t* positions, const float* numbers, const int64_t* integers, int64_t count,
                              int64_t vocab, int64_t threads) {
    const int64_t blocks = (vocab + BLOCK - 1) / BLOCK, each = PIECE / BLOCK, pieces = (blocks + each - 1) / each;
    std::vector<float> block_peaks(count * blocks);
    std::vector<Best> best(count * pieces);
    const auto row = [&](int64_t r) {
        const float* number = numbers + 3 * rows[r];
        const int64_t* integer = integers + 2 * rows[r];
        const uint64_t key = finalize(((uint64_t)integer[0] ^ (uint64_t)positions[r]) + GOLDEN);
        return Row{logits + r * stride, &block_peaks[r * blocks], vocab,     blocks,    key,
                   number[0],           number[1],                number[2], integer[1]};
    };
    run_team(threads_for(count * vocab, 1 << 15, (int)threads), [&](Team& team) {
        team.share(count * pieces, [&](int64_t i, int64_t to) {
            for (; i < to; i++) {
                const int64_t from = i % pieces * each, end = std::min(blocks, from + each);
                Row part = row(i / pieces);
                part.fill_peaks(from, end);
                if (!part.truncates()) best[i] = part.best_of(from, end, LOW, LOW);
            }
        });
        team.share(count, [&](int64_t r, int64_t to) {
            for (; r < to; r++) {
                const Row drawn = row(r);
                peaks[r] = *std::max_element(drawn.peaks, drawn.peaks + blocks);
                if (drawn.truncates()) {
                    tokens[r] = std::isfinite(peaks[r]) ? drawn.truncated() : 0;
                    continue;
                }
                Best winner = best[r * pieces];
                for (int64_t p = 1; p < pieces; p++)
                    if (best[r * pieces + p].score > winner.score) winner = best[r * pieces + p];
                tokens[r] = winner.index;
            }
        });
    });
}

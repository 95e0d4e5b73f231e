// Gumbel noise as headrace_kernels.reference.noise defines it, bit for bit, without fused multiply-add.
#include <algorithm>
#include <limits>
#include <vector>

#include "team.h"
#include "vector.h"

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
constexpr float LARGEST_NOISE = 23.f;  // the definition's maximum is 22.9
constexpr int BLOCK = 256;             // entries tested at once against the best so far
constexpr int64_t PIECE = 8192;        // entries per work item

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

void fill(float* out, uint64_t key, int64_t first, int count) {
    for (int i = 0; i < count; i++) out[i] = noise_of((uint32_t)(finalize(key + GOLDEN * (uint64_t)(first + i + 1)) >> 32));
}

struct Best {
    float score;
    int64_t index;
};

Best best_of(const float* scores, uint64_t key, int64_t from, int64_t to) {
    Best best{-std::numeric_limits<float>::infinity(), from};
    float noise[BLOCK];
    for (int64_t base = from; base < to; base += BLOCK) {
        const int count = (int)std::min<int64_t>(BLOCK, to - base);
        float peak = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : peak)
        for (int i = 0; i < count; i++) peak = scores[base + i] > peak ? scores[base + i] : peak;
        if (!(peak + LARGEST_NOISE > best.score)) continue;  // no noise could make one of these the maximum
        fill(noise, key, base, count);
        float highest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : highest)
        for (int i = 0; i < count; i++) {
            noise[i] += scores[base + i];
            highest = noise[i] > highest ? noise[i] : highest;
        }
        if (!(highest > best.score)) continue;
        for (int i = 0; i < count; i++)
            if (noise[i] > best.score) best = {noise[i], base + i};
    }
    return best;
}

}  // namespace

extern "C" void headrace_gumbel_noise_at(float* out, const int64_t* keys, const int64_t* ids, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++)
            out[r * n + i] = noise_of((uint32_t)(finalize((uint64_t)keys[r] + GOLDEN * (uint64_t)(ids[r * n + i] + 1)) >> 32));
}

extern "C" void headrace_gumbel_argmax(int64_t* out, const float* scores, int64_t stride, const int64_t* keys,
                                       int64_t rows, int64_t vocab, int64_t threads) {
    const int64_t pieces = (vocab + PIECE - 1) / PIECE;
    std::vector<Best> best(rows * pieces);
    run_team(threads_for(rows * vocab, 1 << 15, (int)threads), [&](Team& team) {
        team.share(rows * pieces, [&](int64_t i, int64_t to) {
            for (; i < to; i++) {
                const int64_t r = i / pieces, first = i % pieces * PIECE;
                best[i] = best_of(scores + r * stride, (uint64_t)keys[r], first, std::min(vocab, first + PIECE));
            }
        });
    });
    for (int64_t r = 0; r < rows; r++) {
        Best winner = best[r * pieces];
        for (int64_t p = 1; p < pieces; p++)
            if (best[r * pieces + p].score > winner.score) winner = best[r * pieces + p];
        out[r] = winner.index;
    }
}

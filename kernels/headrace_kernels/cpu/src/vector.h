// 16 floats as one value. GCC and Clang lower it to the registers of the CPU: AVX-512, two of AVX2, four of NEON.
#pragma once
#include <cstdint>
#include <cstring>

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));

constexpr int WIDTH = 16;

static inline floats load(const float* from) {
    floats x;
    std::memcpy(&x, from, sizeof x);  // unaligned
    return x;
}

static inline void store(float* to, floats x) { std::memcpy(to, &x, sizeof x); }

static inline floats spread(float x) { return x - floats{}; }

static inline floats pick(ints mask, floats yes, floats no) { return mask ? yes : no; }

static inline float sum(floats x) {
    float part[WIDTH];
    store(part, x);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

static inline float largest(floats x) {
    float part[WIDTH];
    store(part, x);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
    return part[0];
}

// e**x to about 2 units in the last place; x below -87 counts as -87 and above 88 as 88; NaN stays NaN.
static inline floats exponential(floats x) {
    x = pick(x < spread(-87.f), spread(-87.f), x);
    x = pick(x > spread(88.f), spread(88.f), x);
    const floats magic = spread(12582912.f);  // 1.5 * 2**23: adding it rounds to an integer in the low mantissa bits
    floats shifted = x * 1.44269504088896341f + magic;
    floats n = shifted - magic;
    floats r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    floats p = spread(1.f / 5040);
    p = p * r + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    ints bits = ((ints)shifted - (ints)magic + 127) << 23;
    return p * (floats)bits;
}

// tanh(x); a series near 0, where (e - 1) / (e + 1) would cancel.
static inline floats hyperbolic_tangent(floats x) {
    floats e = exponential(x + x);
    floats far = 1.f - 2.f / (e + 1.f);
    floats z = x * x;
    floats near = spread(62.f / 2835);
    near = near * z - 17.f / 315;
    near = near * z + 2.f / 15;
    near = near * z - 1.f / 3;
    near = x + x * z * near;
    return pick((x < spread(0.25f)) & (x > spread(-0.25f)), near, far);
}

// Number of threads for a piece of work: below `grain` units each, waking a thread takes longer than it saves.
static inline int threads_for(int64_t work, int64_t grain, int threads) {
    int64_t useful = work / grain;
    return useful < 1 ? 1 : useful < threads ? (int)useful : threads;
}

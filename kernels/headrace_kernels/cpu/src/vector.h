// 16 numbers as one value: a register of AVX-512; elsewhere two registers of AVX2, or four of NEON. Compilers keep vectors that
// are larger than a register in memory, so those are halves of halves.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define REGISTER 64
#elif defined(__AVX2__)
#define REGISTER 32
#else
#define REGISTER 16
#endif

typedef float float_register __attribute__((vector_size(REGISTER)));
typedef int32_t int_register __attribute__((vector_size(REGISTER)));
typedef uint32_t word_register __attribute__((vector_size(REGISTER)));

template <class M, class V> inline V pick(M mask, V yes, V no) { return mask ? yes : no; }

// x * y + z, rounded once. Left to compilers, which sums are made so depends on their version, on the CPU that they tune for
// and on the code around: sources are compiled without such contractions.
inline float_register multiply_add(float_register x, float_register y, float_register z) {
#if defined(__AVX512F__)
    return (float_register)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__AVX2__) && defined(__FMA__)
    return (float_register)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__ARM_NEON)
    return (float_register)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + z;  // rounded twice: such CPUs have no other way
#endif
}

inline float_register converted(int_register x) { return __builtin_convertvector(x, float_register); }

// Two halves, which are registers or of this type again; E: of an element.
template <class H, class E> struct Two {
    H low, high;
    // The same bits as other numbers.
    template <class W, class F> explicit operator Two<W, F>() const { return {(W)low, (W)high}; }
};

template <class E> struct Scalar { typedef E type; };  // an argument that another one gives the type of

#define FOR_BOTH(op, result, element)                                                                                      \
    template <class H, class E> inline auto operator op(Two<H, E> x, Two<H, E> y) {                                        \
        return Two<result, element>{x.low op y.low, x.high op y.high};                                                     \
    }                                                                                                                      \
    template <class H, class E> inline auto operator op(Two<H, E> x, typename Scalar<E>::type y) {                         \
        return Two<result, element>{x.low op y, x.high op y};                                                              \
    }                                                                                                                      \
    template <class H, class E> inline auto operator op(typename Scalar<E>::type x, Two<H, E> y) {                         \
        return Two<result, element>{x op y.low, x op y.high};                                                              \
    }
#define NUMBERS(op) FOR_BOTH(op, H, E)
#define MASKS(op) FOR_BOTH(op, decltype(H{} op H{}), int32_t)
NUMBERS(+) NUMBERS(-) NUMBERS(*) NUMBERS(/) NUMBERS(&) NUMBERS(|) NUMBERS(<<) NUMBERS(>>)
MASKS(<) MASKS(>) MASKS(>=)
#undef NUMBERS
#undef MASKS
#undef FOR_BOTH

template <class H, class E> inline Two<H, E> operator-(Two<H, E> x) { return {-x.low, -x.high}; }
template <class H, class E> inline Two<H, E>& operator+=(Two<H, E>& x, Two<H, E> y) { return x = x + y; }

template <class M, class I, class H, class E> inline Two<H, E> pick(Two<M, I> mask, Two<H, E> yes, Two<H, E> no) {
    return {pick(mask.low, yes.low, no.low), pick(mask.high, yes.high, no.high)};
}

template <class H, class E> inline Two<H, E> multiply_add(Two<H, E> x, Two<H, E> y, Two<H, E> z) {
    return {multiply_add(x.low, y.low, z.low), multiply_add(x.high, y.high, z.high)};
}

template <class H, class E> inline auto converted(Two<H, E> x) {
    return Two<decltype(converted(x.low)), float>{converted(x.low), converted(x.high)};
}

#if REGISTER == 64
typedef float_register floats;
typedef int_register ints;
typedef word_register words;
#elif REGISTER == 32
typedef Two<float_register, float> floats;
typedef Two<int_register, int32_t> ints;
typedef Two<word_register, uint32_t> words;
#else
typedef Two<Two<float_register, float>, float> floats;
typedef Two<Two<int_register, int32_t>, int32_t> ints;
typedef Two<Two<word_register, uint32_t>, uint32_t> words;
#endif

constexpr int WIDTH = 16;
constexpr int LANES = REGISTER / 4;
constexpr int PIECES = WIDTH / LANES;  // registers of a value

template <class V> inline void split(V x, V* to) { *to = x; }
template <class H, class E, class V> inline void split(Two<H, E> x, V* to) {
    split(x.low, to);
    split(x.high, to + sizeof(H) / sizeof(V));
}

// Unaligned, register by register: of larger copies compilers make ones through memory in smaller parts.
template <class T> struct Memory {
    static T read(const char* from) {
        T x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }
    static void write(char* to, T x) { std::memcpy(to, &x, sizeof x); }
};

template <class H, class E> struct Memory<Two<H, E>> {
    static Two<H, E> read(const char* from) { return {Memory<H>::read(from), Memory<H>::read(from + sizeof(H))}; }
    static void write(char* to, Two<H, E> x) {
        Memory<H>::write(to, x.low);
        Memory<H>::write(to + sizeof(H), x.high);
    }
};

template <class T> inline T read(const void* from) { return Memory<T>::read((const char*)from); }

static inline floats load(const float* from) { return read<floats>(from); }

static inline void store(float* to, floats x) { Memory<floats>::write((char*)to, x); }

// 0 to 15.
static inline ints lanes() {
    int32_t number[WIDTH];
    for (int i = 0; i < WIDTH; i++) number[i] = i;
    ints x;
    std::memcpy(&x, number, sizeof x);
    return x;
}

static inline floats spread(float x) { return x - floats{}; }

// The lanes of two registers, numbered one after the other, that a constant index names.
static inline float_register shuffled(float_register a, float_register b, int_register index) {
#if defined(__clang__)  // it has no function for it that GCC before version 12 has, too
    float_register x;
    for (int i = 0; i < LANES; i++) x[i] = index[i] < LANES ? a[index[i]] : b[index[i] - LANES];
    return x;
#else
    return __builtin_shuffle(a, b, index);
#endif
}

// Both halves of a value as one, down to a number: the same pairs for every size of registers.
template <class Op> inline float fold(float_register x, Op op) {
    for (int half = LANES / 2; half; half /= 2) {
        int_register other;
        for (int i = 0; i < LANES; i++) other[i] = (i + half) % LANES;
        x = op(x, shuffled(x, x, other));
    }
    return x[0];
}

template <class H, class E, class Op> inline float fold(Two<H, E> x, Op op) { return fold(op(x.low, x.high), op); }

static inline float sum(floats x) {
    return fold(x, [](auto a, auto b) { return a + b; });
}

static inline float largest(floats x) {
    return fold(x, [](auto a, auto b) { return pick(a > b, a, b); });
}

// e**x to about 2 units in the last place; x below -87 counts as -87 and above 88 as 88; NaN stays NaN.
static inline floats exponential(floats x) {
    x = pick(x < spread(-87.f), spread(-87.f), x);
    x = pick(x > spread(88.f), spread(88.f), x);
    const floats magic = spread(12582912.f);  // 1.5 * 2**23: adding it rounds to an integer in the low mantissa bits
    floats shifted = multiply_add(x, spread(1.44269504088896341f), magic);
    floats n = shifted - magic;
    floats r = multiply_add(n, spread(-0.693359375f), x);
    r = multiply_add(n, spread(2.12194440e-4f), r);
    floats p = spread(1.f / 5040);
    p = multiply_add(p, r, spread(1.f / 720));
    p = multiply_add(p, r, spread(1.f / 120));
    p = multiply_add(p, r, spread(1.f / 24));
    p = multiply_add(p, r, spread(1.f / 6));
    p = multiply_add(p, r, spread(0.5f));
    p = multiply_add(p, r, spread(1.f));
    p = multiply_add(p, r, spread(1.f));
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

// log(1 + e**x): of 1 + e**-|x| by the series of the inverse hyperbolic tangent, whose argument is 1/3 at most.
static inline floats softplus(floats x) {
    const floats e = exponential(pick(x > floats{}, -x, x)), s = e / (2.f + e), z = s * s;
    floats series = spread(1.f / 15);
    for (int i = 13; i > 0; i -= 2) series = multiply_add(series, z, spread(1.f / i));
    return pick(x > floats{}, x, floats{}) + 2.f * s * series;
}

static inline floats silu(floats x) { return x / (1.f + exponential(-x)); }

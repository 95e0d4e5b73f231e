// x @ weight.T for weights in panels of 16 outputs: float32, bfloat16, or codes of 8 or 4 bits with a scale and a minimum per
// group of inputs: whole numbers, or in floating point (e4m3, e2m1) without a minimum. `packed.py` describes the layout.
//
// The codes themselves are multiplied, and a group adds scale * sum(code * x) + minimum * sum(x). Whole ones are stored as
// signed numbers around zero: as large ones, their sums would lose digits against the minimum's.
//
// One template makes every number of rows, in the order of the inputs: a row's bits depend on nothing else.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "entries.h"
#include "vector.h"

namespace {

// EXPANDED: codes of a panel as numbers, for many rows; the values are the same.
enum Form { FLOAT32 = 0, BFLOAT16 = 1, CODES8 = 2, CODES4 = 3, E4M3 = 4, E2M1 = 5, EXPANDED = 6 };

constexpr bool in_nibbles(int64_t form) { return form == CODES4 || form == E2M1; }

struct Weight {
    const uint8_t* data;
    int64_t outputs, inputs, group, bits;
    Form form;
    bool wide;    // scales are float32, else float16
    bool minima;  // are stored, else a minimum is -offset * scale
    float offset;
    float centre;  // what was subtracted from the codes
    int64_t scale_bytes, header, panel;  // of one group's scales, of all before the codes, of a panel

    Weight(const uint8_t* data, int64_t outputs, int64_t inputs, int64_t form, int64_t group, int64_t wide, int64_t minima,
           float offset, float centre)
        : data(data), outputs(outputs), inputs(inputs), group(group),
          bits(form == FLOAT32 ? 32 : form == BFLOAT16 ? 16 : in_nibbles(form) ? 4 : 8), form((Form)form), wide(wide),
          minima(minima), offset(offset), centre(centre) {
        const bool coded = form >= CODES8;
        scale_bytes = coded ? WIDTH * (wide ? 4 : 2) : 0;
        header = coded ? inputs / group * scale_bytes * (minima ? 2 : 1) : 0;
        panel = header + inputs * WIDTH * bits / 8;
    }

    // Of the codes as they were before `centre` was subtracted.
    inline void scales(const uint8_t* panel, int64_t group, floats* scale, floats* least) const;

    // Whether a value is more than scale * stored code.
    bool has_least() const { return minima || offset != centre; }
};

// The j-th of eight numbers of 4 bits.
inline floats nibble_numbers(words codes, int j) { return converted((ints)(codes << (uint32_t)(28 - j * 4)) >> 28); }

#if defined(__aarch64__)
typedef __fp16 half;  // compilers of C++ had no _Float16 for it before GCC 13
#else
typedef _Float16 half;
#endif

// Compilers make single conversions of what follows, so the units are named.
inline floats numbers(const uint8_t* from, bool wide) {
    if (wide) return read<floats>(from);
#ifdef __AVX512F__
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i* two = (const __m128i*)from;
    return {(float_register)_mm256_cvtph_ps(_mm_loadu_si128(two)), (float_register)_mm256_cvtph_ps(_mm_loadu_si128(two + 1))};
#else
    float x[WIDTH];
    for (int i = 0; i < WIDTH; i++) x[i] = read<half>(from + 2 * i);
    return load(x);
#endif
}

constexpr float E4M3_UNIT = 256;  // of `e4m3_numbers`
#ifdef __AVX512F__
constexpr float E2M1_UNIT = 1;  // of `E2m1`
#else
constexpr float E2M1_UNIT = 1.f / (1 << 25);
#endif

inline void Weight::scales(const uint8_t* panel, int64_t g, floats* scale, floats* least) const {
    *scale = numbers(panel + g * scale_bytes, wide);
    if (form == E4M3) *scale = *scale * E4M3_UNIT;
    if (form == E2M1) *scale = *scale * E2M1_UNIT;
    *least = minima ? numbers(panel + (inputs / group + g) * scale_bytes, wide) : *scale * -offset;
}

inline floats byte_numbers(const uint8_t* from) {
#ifdef __AVX512F__
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    const __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
    const __m256i high = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)));
    return {(float_register)_mm256_cvtepi32_ps(low), (float_register)_mm256_cvtepi32_ps(high)};
#else
    float x[WIDTH];
    for (int i = 0; i < WIDTH; i++) x[i] = (int8_t)from[i];
    return load(x);
#endif
}

// A 256th of each of 16 numbers in e4m3: one in float16 has the same bits of exponent and mantissa at another place.
inline floats e4m3_numbers(const uint8_t* from) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)), 7);
    const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80));
#ifdef __AVX512F__
    return (floats)_mm512_cvtph_ps(halves);
#else
    return {(float_register)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
            (float_register)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
#else
    float x[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
        const uint16_t bits = (uint16_t)((int8_t)from[i] * 128) & 0xbf80;
        x[i] = read<half>(&bits);
    }
    return load(x);
#endif
}

constexpr float E2M1_NUMBERS[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

#ifndef __AVX512F__
// Eight numbers in e2m1 of each lane are looked up at once, as bytes of twice the value. One of them becomes the highest
// byte of an integer: 2 ** 25 times the value.
#if defined(__AVX2__)
// In each 16 bytes of `x` those at `places`, or zero where a place is above 127.
inline word_register shuffled(word_register x, word_register places) {
    return (word_register)_mm256_shuffle_epi8((__m256i)x, (__m256i)places);
}
#elif defined(__ARM_NEON)
inline word_register shuffled(word_register x, word_register places) {
    return (word_register)vqtbl1q_u8((uint8x16_t)x, (uint8x16_t)places);
}
#else
inline word_register shuffled(word_register x, word_register places) {
    uint8_t from[sizeof x], at[sizeof x], to[sizeof x];
    std::memcpy(from, &x, sizeof x);
    std::memcpy(at, &places, sizeof x);
    for (size_t i = 0; i < sizeof x; i++) to[i] = at[i] > 127 ? 0 : from[(i & ~15) + (at[i] & 15)];
    return read<word_register>(to);
}
#endif

inline word_register e2m1_bytes(word_register codes) {
    static constexpr int8_t TWICE[2][16] = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
                                            {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};
    return shuffled(read<word_register>(TWICE), codes & 0x0f0f0f0fu);
}

// Times 2 ** 24, those of the byte k of each word.
inline float_register raised_bytes(word_register bytes, int k) {
    static constexpr uint32_t FIRST[] = {0x00808080, 0x04808080, 0x08808080, 0x0c808080,
                                         0x00808080, 0x04808080, 0x08808080, 0x0c808080};
    return converted((int_register)shuffled(bytes, read<word_register>(FIRST) + ((uint32_t)k << 24)));
}
template <class H, class E> inline Two<H, E> e2m1_bytes(Two<H, E> x) { return {e2m1_bytes(x.low), e2m1_bytes(x.high)}; }
template <class H, class E> inline auto raised_bytes(Two<H, E> x, int k) {
    return Two<decltype(raised_bytes(x.low, k)), float>{raised_bytes(x.low, k), raised_bytes(x.high, k)};
}
#endif

// Eight numbers in e2m1 for each of 16 outputs.
struct E2m1 {
#ifdef __AVX512F__
    words codes;
    inline void load(words from) { codes = from; }
    inline floats get(int j) const {
        return (floats)_mm512_permutexvar_ps((__m512i)(codes >> (uint32_t)(j * 4)), _mm512_loadu_ps(E2M1_NUMBERS));
    }
#else
    words bytes[2];
    inline void load(words from) {
        bytes[0] = e2m1_bytes(from);
        bytes[1] = e2m1_bytes(from >> 4u);
    }
    inline floats get(int j) const { return raised_bytes(bytes[j & 1], j >> 1); }
#endif
};

template <Form F> using Chunk = typename std::conditional<F == E2M1, E2m1, words>::type;

// Of one input for a panel.
template <Form F, bool PAIRS> constexpr int BYTES = F == EXPANDED ? (PAIRS ? 32 : 64) : F == FLOAT32 ? 64 : F == BFLOAT16 ? 32
                                                    : in_nibbles(F) ? 8 : 16;

// The values of some inputs for a panel, of codes without scale: one of float32 and 8 bits, two of bfloat16, eight of 4 bits.
template <Form F> struct Column {
    Chunk<F> chunk;

    inline void load(const uint8_t* codes) {
        if constexpr (F == CODES8)
            chunk = (words)byte_numbers(codes);
        else if constexpr (F == E4M3)
            chunk = (words)e4m3_numbers(codes);
        else if constexpr (F == E2M1)
            chunk.load(read<words>(codes));
        else
            chunk = read<words>(codes);
    }

    inline floats get(int j) const {
        if constexpr (F == E2M1)
            return chunk.get(j);
        else if constexpr (F == CODES4)
            return nibble_numbers(chunk, j);
        else if constexpr (F == BFLOAT16)
            return (floats)(j ? chunk & 0xffff0000u : chunk << 16);
        else
            return (floats)chunk;
    }
};

// The same of two inputs of bfloat16 and 8 bits, or eight of 4 bits, as pairs of bfloat16, in which codes are exact: of
// inputs that are four apart for 4 bits, else neighbours.
template <Form F> struct PairColumn {
    Chunk<F> chunk;

    inline void load(const uint8_t* codes) {
        if constexpr (F == CODES8)
            chunk = (words)byte_numbers(codes) >> 16 | (words)byte_numbers(codes + 16);
        else if constexpr (F == E4M3)
            chunk = (words)e4m3_numbers(codes) >> 16 | (words)e4m3_numbers(codes + 16);
        else if constexpr (F == E2M1)
            chunk.load(read<words>(codes));
        else
            chunk = read<words>(codes);
    }

    inline words get(int j) const {
        if constexpr (F == E2M1)
            return (words)chunk.get(j) >> 16 | (words)chunk.get(j + 4);
        else if constexpr (F != CODES4)
            return chunk;
        else
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
            return (words)_mm512_permutexvar_epi16((__m512i)(chunk >> (uint32_t)(j * 4) & 0x000f000fu), (__m512i)TABLE);
#else
            return (words)nibble_numbers(chunk, j) >> 16 | (words)nibble_numbers(chunk, j + 4);
#endif
    }

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    // The numbers 0 to 7 and -8 to -1 in bfloat16, in all 16-bit places that an index of 5 bits reaches.
    static constexpr words TABLE = {0x3f800000, 0x40404000, 0x40a04080, 0x40e040c0, 0xc0e0c100, 0xc0a0c0c0,
                                    0xc040c080, 0xbf80c000, 0x3f800000, 0x40404000, 0x40a04080, 0x40e040c0,
                                    0xc0e0c100, 0xc0a0c0c0, 0xc040c080, 0xbf80c000};
#endif
};

// total + a.low * b.low + a.high * b.high
inline float_register add_pairs(float_register total, word_register a, word_register b) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    return (float_register)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    total = multiply_add((float_register)(a << 16), (float_register)(b << 16), total);
    return multiply_add((float_register)(a & 0xffff0000u), (float_register)(b & 0xffff0000u), total);
#endif
}

// Inputs that a column reads at a time, and how many times it is multiplied for them.
template <Form F, bool PAIRS> constexpr int STEP = in_nibbles(F) ? 8 : F == BFLOAT16 || PAIRS ? 2 : 1;
template <Form F, bool PAIRS> constexpr int TURNS = STEP<F, PAIRS> / (PAIRS ? 2 : 1);

// One product of a packed weight. A thread computes panels for all rows, in blocks of inputs whose weights stay in its cache.
struct Product {
    const Weight& w;
    const uint32_t* inputs;  // rows in tiles, each [words of a row, rows of the tile]: numbers, or pairs of bfloat16
    const float* sums;       // [rows, groups]: of each row's inputs; null where no minimum needs them
    const float* bias;
    float* out;
    int64_t rows;
};

// The inputs [from, to) of a product for P panels, whose codes begin at `from`.
template <int P> struct Block {
    int64_t panel, from, to;
    const uint8_t* codes[P];
    float* partial;  // [rows, P * 16]: sums of the blocks before
};

// Adds the products of the inputs [first, to) to the sums of R rows times P panels: in float32, or in pairs of bfloat16.
// codes: of the input `origin`.
template <Form F, bool PAIRS, int R, int P>
inline __attribute__((always_inline)) void multiply(const uint8_t* const* codes, int64_t origin, int64_t first, int64_t to,
                                                    const uint32_t* x, float_register (*part)[P * PIECES]) {
    constexpr int step = STEP<F, PAIRS>, turns = TURNS<F, PAIRS>;
    constexpr int together = R == 1 && (F == E2M1 || F == CODES8) ? 1 : P;  // panels: one row reads no value twice, and keeps few in registers
    typename std::conditional<PAIRS, PairColumn<F>, Column<F>>::type column[together];
    for (; first < to; first += step)
#pragma GCC unroll 4
        for (int panel = 0; panel < P; panel += together) {
            for (int p = 0; p < together; p++) column[p].load(codes[panel + p] + (first - origin) * BYTES<F, PAIRS>);
#pragma GCC unroll 8
            for (int j = 0; j < turns; j++) {
                const uint32_t* input = x + (first / (PAIRS ? 2 : 1) + j) * R;
                typename std::conditional<PAIRS, word_register, float_register>::type value[together * PIECES];
                for (int p = 0; p < together; p++) split(column[p].get(j), value + p * PIECES);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++)
                    for (int p = 0; p < together * PIECES; p++) {
                        float_register& sum = part[r][panel * PIECES + p];
                        if constexpr (PAIRS)
                            sum = add_pairs(sum, value[p], input[r] - word_register{});
                        else
                            sum = multiply_add(value[p], read<float>(input + r) - float_register{}, sum);
                    }
            }
        }
}

// Adds a block to the totals of R rows times P panels. sums: of the rows' groups of inputs, or null.
template <Form F, bool PAIRS, int R, int P>
inline void multiply_groups(const Weight& w, const Block<P>& block, const uint32_t* x, const float* sums, floats (*total)[P]) {
    const int64_t groups = w.inputs / w.group;
    for (int64_t g = block.from / w.group; g < block.to / w.group; g++) {
        float_register part[R][P * PIECES]{};  // compilers keep these in registers, and arrays of `floats` not always
        multiply<F, PAIRS, R, P>(block.codes, block.from, g * w.group, (g + 1) * w.group, x, part);
        floats scale[P], least[P];
        for (int p = 0; p < P; p++) {
            w.scales(w.data + (block.panel + p) * w.panel, g, &scale[p], &least[p]);
            least[p] = multiply_add(scale[p], spread(w.centre), least[p]);
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) {
                total[r][p] = multiply_add(scale[p], read<floats>(part[r] + p * PIECES), total[r][p]);
                if (sums) total[r][p] = multiply_add(least[p], spread(sums[r * groups + g]), total[r][p]);
            }
    }
}

// The rows [row, row + R). Not inlined: compilers keep the sums of a loop that is part of a larger function in memory.
template <Form F, bool PAIRS, int R, int P>
__attribute__((noinline)) void tile(const Product& product, const Block<P>& block, int64_t row) {
    const Weight& w = product.w;
    float* partial = block.partial + row * P * WIDTH;
    const uint32_t* x = product.inputs + row * (w.inputs / (PAIRS ? 2 : 1));
    const auto before = [&](int r, int p) { return block.from ? load(partial + (r * P + p) * WIDTH) : floats{}; };
    floats total[R][P];
    if constexpr (F >= CODES8) {
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) total[r][p] = before(r, p);
        const float* sums = product.sums ? product.sums + row * (w.inputs / w.group) : nullptr;
        multiply_groups<F, PAIRS, R, P>(w, block, x, sums, total);
    } else {
        float_register part[R][P * PIECES];
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) split(before(r, p), part[r] + p * PIECES);
        multiply<F, PAIRS, R, P>(block.codes, block.from, block.from, block.to, x, part);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) total[r][p] = read<floats>(part[r] + p * PIECES);
    }
    for (int p = 0; p < P; p++) {
        const int64_t first = (block.panel + p) * WIDTH;
        const int64_t kept = std::min<int64_t>(WIDTH, w.outputs - first);
        for (int r = 0; r < R; r++) {
            if (block.to < w.inputs) {
                store(partial + (r * P + p) * WIDTH, total[r][p]);
                continue;
            }
            float values[WIDTH];
            store(values, total[r][p]);
            for (int64_t i = 0; i < kept; i++)
                product.out[(row + r) * w.outputs + first + i] = values[i] + (product.bias ? product.bias[first + i] : 0.f);
        }
    }
}

// The inputs [from, to) of one panel as they are multiplied.
template <Form F, bool PAIRS> void expand(const uint8_t* codes, int64_t from, int64_t to, uint8_t* into) {
    typename std::conditional<PAIRS, PairColumn<F>, Column<F>>::type column;
    for (int64_t first = from; first < to; first += STEP<F, PAIRS>) {
        column.load(codes + first * BYTES<F, PAIRS>);
        for (int j = 0; j < TURNS<F, PAIRS>; j++, into += sizeof(floats)) store((float*)into, (floats)column.get(j));
    }
}

#ifdef __AVX512F__
constexpr int ROWS = 12, PAIR = 2, QUAD = 4;  // 24 sums of the 32 registers
#else
constexpr int ROWS = 6, PAIR = 1, QUAD = 4;  // 12 of the 16 of half the size
#endif
constexpr int MANY = 2 * ROWS;     // rows for which weights are expanded
constexpr int64_t INPUTS = 256;    // of a block: with it the weights of PAIR panels take 16 to 32 KiB

// kernel(row, count): for each tile of rows, its first row and the constant number of its rows.
template <class Kernel> inline void for_tiles(int64_t rows, Kernel kernel) {
    int64_t row = 0;
    auto run = [&](auto count) {
        for (; row + count.value <= rows; row += count.value) kernel(row, count);
    };
    run(std::integral_constant<int, ROWS>{});
    run(std::integral_constant<int, 4>{});
    run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, 1>{});
}

// All rows times P panels.
template <Form F, bool PAIRS, int P> void times(const Product& product, int64_t panel, float* partial, uint8_t* space) {
    constexpr bool CODED = F >= CODES8;
    constexpr Form NUMBERS = CODED ? EXPANDED : FLOAT32;
    const Weight& w = product.w;
    const int64_t unit = CODED ? w.group : 8, most = product.rows == 1 ? w.inputs : std::max<int64_t>(INPUTS / unit, 1) * unit;
    Block<P> block{panel, 0, 0, {}, partial};
    for (; block.from < w.inputs; block.from = block.to) {
        block.to = std::min(block.from + most, w.inputs);
        for (int p = 0; p < P; p++) {
            const uint8_t* codes = w.data + (panel + p) * w.panel + w.header;
            block.codes[p] = codes + block.from * WIDTH * w.bits / 8;
            if (!space) continue;
            uint8_t* into = space + p * most * (PAIRS ? 32 : 64);
            expand<F, PAIRS>(codes, block.from, block.to, into);
            block.codes[p] = into;
        }
        if constexpr (P == QUAD) {  // for one row alone
            tile<F, PAIRS, 1, P>(product, block, 0);
        } else {
            for_tiles(product.rows, [&](int64_t row, auto count) {
                if (space)
                    tile<NUMBERS, PAIRS, decltype(count)::value, P>(product, block, row);
                else
                    tile<F, PAIRS, decltype(count)::value, P>(product, block, row);
            });
        }
    }
}

// All rows times the panels [from, to).
template <Form F, bool PAIRS> void share(const Product& product, int64_t from, int64_t to) {
    const Weight& w = product.w;
    int64_t panel = from;
    if (product.rows == 1) {
        for (; panel + QUAD <= to; panel += QUAD) times<F, PAIRS, QUAD>(product, panel, nullptr, nullptr);
        for (; panel < to; panel++) times<F, PAIRS, 1>(product, panel, nullptr, nullptr);
        return;
    }
    constexpr bool EXPANDS = F >= CODES8 || (F == BFLOAT16 && !PAIRS);
    std::vector<float> partial(product.rows * PAIR * WIDTH);
    std::vector<uint8_t> space(EXPANDS && product.rows >= MANY ? PAIR * std::max(INPUTS, w.group) * (PAIRS ? 32 : 64) : 0);
    uint8_t* expanded = space.empty() ? nullptr : space.data();
    for (; panel + PAIR <= to; panel += PAIR) times<F, PAIRS, PAIR>(product, panel, partial.data(), expanded);
    for (; panel < to; panel++) times<F, PAIRS, 1>(product, panel, partial.data(), expanded);
}

// Rounded to bfloat16, to the nearest even; NaN stays NaN.
inline uint32_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0u : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// The sum of a group's inputs, rounded to bfloat16 or not; lanes first, so that its order depends on n alone.
inline float group_sum(const float* x, int64_t n, bool in_pairs) {
    floats acc{};
    float rest = 0.f;
    int64_t i = 0;
    for (; !in_pairs && i + WIDTH <= n; i += WIDTH) acc = acc + load(x + i);
    for (; i < n; i++) {
        float input = x[i];
        const uint32_t bits = rounded(input) << 16;
        if (in_pairs) std::memcpy(&input, &bits, 4);
        rest += input;
    }
    return in_pairs ? rest : sum(acc) + rest;
}

// Eight inputs in pairs: neighbours, or of 4-bit codes those that are four apart.
inline void pair(const float* x, bool apart, uint32_t* to) {
    for (int i = 0; i < 4; i++)
        to[i] = apart ? rounded(x[i]) | rounded(x[i + 4]) << 16 : rounded(x[2 * i]) | rounded(x[2 * i + 1]) << 16;
}

// The inputs [from, to) of all rows as a product reads them.
void arrange(const Weight& w, bool in_pairs, const float* x, int64_t rows, int64_t from, int64_t to, uint32_t* into) {
    for_tiles(rows, [&](int64_t row, auto count) {
        constexpr int R = decltype(count)::value;
        const float* first = x + row * w.inputs;
        if (!in_pairs) {
            uint32_t* tile = into + row * w.inputs;
            for (int64_t i = from; i < to; i++)
                for (int r = 0; r < R; r++) std::memcpy(&tile[i * R + r], &first[r * w.inputs + i], 4);
            return;
        }
        uint32_t* tile = into + row * w.inputs / 2;
        for (int64_t i = from; i < to; i += 8) {
            uint32_t four[R][4];
            for (int r = 0; r < R; r++) pair(first + r * w.inputs + i, in_nibbles(w.form), four[r]);
            for (int j = 0; j < 4; j++)
                for (int r = 0; r < R; r++) tile[(i / 2 + j) * R + r] = four[r][j];
        }
    });
}

template <bool PAIRS> void run(const Product& product, int64_t from, int64_t to) {
    switch (product.w.form) {
        case FLOAT32: return share<FLOAT32, false>(product, from, to);
        case BFLOAT16: return share<BFLOAT16, PAIRS>(product, from, to);
        case CODES8: return share<CODES8, PAIRS>(product, from, to);
        case E4M3: return share<E4M3, PAIRS>(product, from, to);
        case E2M1: return share<E2M1, PAIRS>(product, from, to);
        default: return share<CODES4, PAIRS>(product, from, to);
    }
}

}  // namespace

extern "C" int64_t headrace_has_bfloat16_products() {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    return 1;
#else
    return 0;
#endif
}

void multiply_packed(Team& team, const Matrix& m, const float* x, int64_t rows, float* out, uint32_t* space) {
    const Weight w(m.data, m.outputs, m.inputs, m.form, m.group, m.wide, m.minima, (float)m.offset, (float)m.centre);
    const int64_t inputs = m.inputs, group = m.group, groups = inputs / group, panels = (m.outputs + WIDTH - 1) / WIDTH;
    const bool arranged = rows > 1 || m.in_pairs;  // one row of numbers is arranged as it is
    float* sums = m.form >= CODES8 && w.has_least() ? (float*)(space + (arranged ? rows * inputs / (m.in_pairs ? 2 : 1) : 0))
                                                    : nullptr;
    if (arranged) {
        const auto [from, to] = team.part((inputs + 7) / 8);
        arrange(w, m.in_pairs, x, rows, from * 8, std::min(to * 8, inputs), space);
    }
    if (sums) {  // [rows, groups]
        for (auto [i, to] = team.part(rows * groups); i < to; i++)
            sums[i] = group_sum(x + i / groups * inputs + i % groups * group, group, m.in_pairs);
    }
    if (arranged || sums) team.wait();
    const Product product{w, arranged ? space : (const uint32_t*)x, sums, m.bias, out, rows};
    team.share((panels + 1) / 2, [&](int64_t from, int64_t to) {  // pairs of panels stay together
        const int64_t last = std::min(panels, 2 * to);
        if (m.in_pairs)
            run<true>(product, 2 * from, last);
        else
            run<false>(product, 2 * from, last);
    });
}

// in_pairs: inputs are rounded to bfloat16; not with weights in float32.
extern "C" void headrace_packed_matmul(float* out, const float* x, int64_t rows, const uint8_t* data, int64_t outputs,
                                       int64_t inputs, int64_t form, int64_t group, int64_t wide, int64_t minima, float offset,
                                       float centre, const float* bias, int64_t in_pairs, int64_t threads) {
    const Matrix m{data, bias, outputs, inputs, form, group, wide, minima, in_pairs, offset, centre};
    std::vector<uint32_t> space(m.words(rows));
    run_team(threads_for(outputs * inputs * std::min<int64_t>(rows, 4), 1 << 16, (int)threads),
             [&](Team& team) { multiply_packed(team, m, x, rows, out, space.data()); });
}

// out [rows, inputs]: the values of these outputs, those that a product multiplies. 1 if there is no such output.
extern "C" int64_t headrace_packed_rows(float* out, const int64_t* ids, int64_t rows, const uint8_t* data, int64_t outputs,
                                        int64_t inputs, int64_t form, int64_t group, int64_t wide, int64_t minima, float offset,
                                        float centre) {
    const Weight w(data, outputs, inputs, form, group, wide, minima, offset, centre);
    for (int64_t r = 0; r < rows; r++) {
        if (ids[r] < 0 || ids[r] >= outputs) return 1;
        const uint8_t *panel = data + ids[r] / WIDTH * w.panel, *codes = panel + w.header;
        const int64_t lane = ids[r] % WIDTH;
        for (int64_t i = 0; i < inputs; i++, out++) {
            if (form == FLOAT32)
                *out = read<float>(codes + (i * WIDTH + lane) * 4);
            else if (form == BFLOAT16) {
                const uint32_t bits = (uint32_t)read<uint16_t>(codes + ((i / 2 * WIDTH + lane) * 2 + i % 2) * 2) << 16;
                std::memcpy(out, &bits, 4);
            } else if (form == CODES8)
                *out = (int8_t)codes[i * WIDTH + lane] + centre;
            else if (form == E4M3) {
                const uint16_t bits = (uint16_t)((int8_t)codes[i * WIDTH + lane] * 128) & 0xbf80;
                *out = read<half>(&bits);
            } else {
                const uint32_t code = read<uint32_t>(codes + (i / 8 * WIDTH + lane) * 4) >> i % 8 * 4 & 15u;
                *out = form == E2M1 ? E2M1_NUMBERS[code] / E2M1_UNIT : code ^ 8u;
            }
        }
        for (int64_t g = 0; form >= CODES8 && g < inputs / group; g++) {
            floats scale, least;
            float factor[WIDTH], minimum[WIDTH];
            w.scales(panel, g, &scale, &least);
            store(factor, scale);
            store(minimum, least);
            for (float* x = out - inputs + g * group; x < out - inputs + (g + 1) * group; x++)
                *x = __builtin_fmaf(*x, factor[lane], minimum[lane]);
        }
    }
    return 0;
}

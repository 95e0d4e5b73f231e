// x @ weight.T for weights in panels of 16 outputs: float32, bfloat16, or codes of 8 or 4 bits with a scale and a minimum per
// group of inputs. `packed.py` describes the layout.
//
// The codes themselves are multiplied, and a group adds scale * sum(code * x) + minimum * sum(x). They are stored as signed
// numbers around zero: as large ones, their sums would lose digits against the minimum's.
//
// One template makes every number of rows, in the order of the inputs: a row's bits depend on nothing else.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "entries.h"
#include "vector.h"

namespace {

// EXPANDED: codes of a panel as numbers, for many rows; the values are the same.
enum Form { FLOAT32 = 0, BFLOAT16 = 1, CODES8 = 2, CODES4 = 3, EXPANDED = 4 };

struct Weight {
    const uint8_t* data;
    int64_t outputs, inputs, group;
    Form form;
    bool wide;    // scales are float32, else float16
    bool minima;  // are stored, else a minimum is -offset * scale
    float offset;
    float centre;  // what was subtracted from the codes
    int64_t scale_bytes, header, panel;  // of one group's scales, of all before the codes, of a panel

    Weight(const uint8_t* data, int64_t outputs, int64_t inputs, int64_t form, int64_t group, int64_t wide, int64_t minima,
           float offset, float centre)
        : data(data), outputs(outputs), inputs(inputs), group(group), form((Form)form), wide(wide), minima(minima),
          offset(offset), centre(centre) {
        const bool coded = form >= CODES8;
        scale_bytes = coded ? WIDTH * (wide ? 4 : 2) : 0;
        header = coded ? inputs / group * scale_bytes * (minima ? 2 : 1) : 0;
        const int64_t bits = form == FLOAT32 ? 32 : form == BFLOAT16 ? 16 : form == CODES8 ? 8 : 4;
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

inline void Weight::scales(const uint8_t* panel, int64_t g, floats* scale, floats* least) const {
    *scale = numbers(panel + g * scale_bytes, wide);
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

// The values of one input for P panels, of codes without scale.
template <Form F, int P> struct Column {
    words chunk[P];

    // Reads the codes of the inputs from `first` on: one of float32 and 8 bits, two of bfloat16, eight of 4 bits.
    inline void load(const uint8_t* const* codes, int64_t first) {
        if (F == BFLOAT16 || F == CODES4)
            for (int p = 0; p < P; p++) chunk[p] = read<words>(codes[p] + first * (F == BFLOAT16 ? 32 : 8));
    }

    inline floats get(const uint8_t* const* codes, int64_t first, int j, int p) const {
        if (F == FLOAT32 || F == EXPANDED) return read<floats>(codes[p] + first * 64);
        if (F == BFLOAT16) return (floats)(j ? chunk[p] & 0xffff0000u : chunk[p] << 16);
        if (F == CODES8) return byte_numbers(codes[p] + first * 16);
        return nibble_numbers(chunk[p], j);
    }
};

// The values of two inputs for P panels, as pairs of bfloat16. Codes are exact in it.
template <Form F, int P> struct PairColumn {
    words chunk[P];

    // Two inputs of bfloat16 and 8 bits, eight of 4 bits: four pairs of inputs that are four apart.
    inline void load(const uint8_t* const* codes, int64_t first) {
        for (int p = 0; p < P; p++) {
            if (F == BFLOAT16 || F == EXPANDED) chunk[p] = read<words>(codes[p] + first * 32);
            if (F == CODES4) chunk[p] = read<words>(codes[p] + first * 8);
            if (F == CODES8) {
                const uint8_t* two = codes[p] + first * 16;
                chunk[p] = (words)byte_numbers(two) >> 16 | (words)byte_numbers(two + 16);
            }
        }
    }

    inline words get(int j, int p) const {
        if (F != CODES4) return chunk[p];
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
        return (words)_mm512_permutexvar_epi16((__m512i)(chunk[p] >> (uint32_t)(j * 4) & 0x000f000fu), (__m512i)TABLE);
#else
        return (words)nibble_numbers(chunk[p], j) >> 16 | (words)nibble_numbers(chunk[p], j + 4);
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
template <Form F, bool PAIRS> constexpr int STEP = F == CODES4 ? 8 : F == BFLOAT16 || PAIRS ? 2 : 1;
template <Form F, bool PAIRS> constexpr int TURNS = STEP<F, PAIRS> / (PAIRS ? 2 : 1);

// R rows times P panels: in float32, or with inputs in bfloat16, which are in pairs then. sums: of each row's inputs per group.
template <Form F, bool PAIRS, int R, int P>
inline void multiply(const Weight& w, const uint8_t* const* panels, const uint8_t* const* codes, const void* inputs,
                     const float* sums, floats (*total)[P]) {
    const float* x = (const float*)inputs;
    const uint32_t* pairs = (const uint32_t*)inputs;
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) total[r][p] = floats{};
    constexpr bool SCALED = F >= CODES8;
    constexpr int step = STEP<F, PAIRS>, turns = TURNS<F, PAIRS>;
    typename std::conditional<PAIRS, PairColumn<F, P>, Column<F, P>>::type column;
    const int64_t group = SCALED ? w.group : w.inputs, groups = w.inputs / group;
    for (int64_t g = 0; g < groups; g++) {
        float_register part[R][P * PIECES];  // compilers keep these in registers, and arrays of `floats` not always
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) split(SCALED ? floats{} : total[r][p], part[r] + p * PIECES);
        for (int64_t first = g * group; first < (g + 1) * group; first += step) {
            column.load(codes, first);
#pragma GCC unroll 8
            for (int j = 0; j < turns; j++) {
                if constexpr (PAIRS) {
                    word_register value[P * PIECES];
                    for (int p = 0; p < P; p++) split(column.get(j, p), value + p * PIECES);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        const word_register input = pairs[(r * w.inputs + first) / 2 + j] - word_register{};
                        for (int p = 0; p < P * PIECES; p++) part[r][p] = add_pairs(part[r][p], value[p], input);
                    }
                } else {
                    float_register value[P * PIECES];
                    for (int p = 0; p < P; p++) split(column.get(codes, first, j, p), value + p * PIECES);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        const float_register input = x[r * w.inputs + first + j] - float_register{};
                        for (int p = 0; p < P * PIECES; p++) part[r][p] = multiply_add(value[p], input, part[r][p]);
                    }
                }
            }
        }
        floats scale[P], least[P];
        for (int p = 0; p < P && SCALED; p++) {
            w.scales(panels[p], g, &scale[p], &least[p]);
            least[p] = multiply_add(scale[p], spread(w.centre), least[p]);
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) {
                const floats whole = read<floats>(part[r] + p * PIECES);
                if (SCALED) {
                    total[r][p] = multiply_add(scale[p], whole, total[r][p]);
                    if (sums) total[r][p] = multiply_add(least[p], spread(sums[r * groups + g]), total[r][p]);
                } else
                    total[r][p] = whole;
            }
    }
}

// Not inlined: compilers keep the sums of a loop that is part of a larger function in memory.
template <Form F, bool PAIRS, int R, int P>
__attribute__((noinline)) void tile(const Weight& w, int64_t panel, const uint8_t* expanded, const void* x, const float* sums, const float* bias,
          float* out) {
    const uint8_t *panels[P], *codes[P];
    for (int p = 0; p < P; p++) {
        panels[p] = w.data + (panel + p) * w.panel;
        codes[p] = expanded ? expanded + p * w.inputs * (PAIRS ? 32 : 64) : panels[p] + w.header;
    }
    floats total[R][P];
    multiply<F, PAIRS, R, P>(w, panels, codes, x, sums, total);
    for (int p = 0; p < P; p++) {
        const int64_t first = (panel + p) * WIDTH;
        const int64_t kept = std::min<int64_t>(WIDTH, w.outputs - first);
        for (int r = 0; r < R; r++) {
            float values[WIDTH];
            store(values, total[r][p]);
            for (int64_t i = 0; i < kept; i++)
                out[r * w.outputs + first + i] = values[i] + (bias ? bias[first + i] : 0.f);
        }
    }
}

// The weights of one panel as they are multiplied.
template <Form F, bool PAIRS> void expand(const Weight& w, int64_t panel, uint8_t* to) {
    const uint8_t* codes = w.data + panel * w.panel + w.header;
    typename std::conditional<PAIRS, PairColumn<F, 1>, Column<F, 1>>::type column;
    for (int64_t first = 0; first < w.inputs; first += STEP<F, PAIRS>) {
        column.load(&codes, first);
        for (int j = 0; j < TURNS<F, PAIRS>; j++, to += sizeof(floats)) {
            if constexpr (PAIRS)
                store((float*)to, (floats)column.get(j, 0));
            else
                store((float*)to, column.get(&codes, first, j, 0));
        }
    }
}

#ifdef __AVX512F__
constexpr int ROWS = 12, PAIR = 2, QUAD = 4;  // 24 sums of the 32 registers
#else
constexpr int ROWS = 6, PAIR = 1, QUAD = 4;  // 12 of the 16 of half the size
#endif
constexpr int MANY = 2 * ROWS;  // rows for which weights are expanded

// All rows times P panels.
template <Form F, bool PAIRS, int P>
void rows_times(const Weight& w, int64_t panel, const uint8_t* expanded, const uint8_t* x, const float* sums, int64_t rows,
                const float* bias, float* out) {
    const int64_t groups = w.inputs / w.group, row_bytes = w.inputs * (PAIRS ? 2 : 4);
    int64_t row = 0;
    auto run = [&](auto kernel, int count) {
        for (; row + count <= rows; row += count)
            kernel(w, panel, expanded, x + row * row_bytes, sums ? sums + row * groups : sums, bias, out + row * w.outputs);
    };
    run(tile<F, PAIRS, ROWS, P>, ROWS);
    run(tile<F, PAIRS, 4, P>, 4);
    run(tile<F, PAIRS, 2, P>, 2);
    run(tile<F, PAIRS, 1, P>, 1);
}

// All rows times the panels [from, to).
template <Form F, bool PAIRS>
void share(const Weight& w, int64_t from, int64_t to, const void* inputs, const float* sums, int64_t rows, const float* bias,
           float* out) {
    const uint8_t* x = (const uint8_t*)inputs;
    int64_t panel = from;
    if (rows == 1) {
        for (; panel + QUAD <= to; panel += QUAD) tile<F, PAIRS, 1, QUAD>(w, panel, nullptr, x, sums, bias, out);
        for (; panel < to; panel++) tile<F, PAIRS, 1, 1>(w, panel, nullptr, x, sums, bias, out);
        return;
    }
    constexpr bool CODED = F >= CODES8, EXPANDS = CODED || (F == BFLOAT16 && !PAIRS);
    constexpr Form NUMBERS = CODED ? EXPANDED : FLOAT32;
    std::vector<uint8_t> space(EXPANDS && rows >= MANY ? PAIR * w.inputs * (PAIRS ? 32 : 64) : 0);
    for (; panel < to; panel += PAIR) {
        const bool both = panel + PAIR <= to;
        if (space.empty()) {
            (both ? rows_times<F, PAIRS, PAIR> : rows_times<F, PAIRS, 1>)(w, panel, nullptr, x, sums, rows, bias, out);
            continue;
        }
        for (int p = 0; p < (both ? PAIR : 1); p++) expand<F, PAIRS>(w, panel + p, &space[p * space.size() / PAIR]);
        (both ? rows_times<NUMBERS, PAIRS, PAIR> : rows_times<NUMBERS, PAIRS, 1>)(w, panel, space.data(), x, sums, rows, bias,
                                                                                  out);
    }
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

// The inputs [first, first + 8) of a row in pairs: neighbours, or of 4-bit codes those that are four apart.
inline void pair(const float* x, bool apart, int64_t n, uint32_t* to) {
    for (int64_t i = 0; i < n / 2; i++)
        to[i] = apart ? rounded(x[i]) | rounded(x[i + 4]) << 16 : rounded(x[2 * i]) | rounded(x[2 * i + 1]) << 16;
}

template <bool PAIRS>
void run(const Weight& w, int64_t from, int64_t to, const void* x, const float* sums, int64_t rows, const float* bias,
         float* out) {
    switch (w.form) {
        case FLOAT32: return share<FLOAT32, false>(w, from, to, x, sums, rows, bias, out);
        case BFLOAT16: return share<BFLOAT16, PAIRS>(w, from, to, x, sums, rows, bias, out);
        case CODES8: return share<CODES8, PAIRS>(w, from, to, x, sums, rows, bias, out);
        default: return share<CODES4, PAIRS>(w, from, to, x, sums, rows, bias, out);
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
    uint32_t* pairs = space;  // [rows, inputs / 2]: x in bfloat16
    float* sums = m.form >= CODES8 && w.has_least() ? (float*)(space + (m.in_pairs ? rows * inputs / 2 : 0)) : nullptr;
    if (m.in_pairs) {
        team.share(rows * inputs / 8, [&](int64_t i, int64_t to) {
            for (; i < to; i++) pair(x + i * 8, m.form == CODES4, 8, &pairs[i * 4]);
        });
    }
    if (sums) {  // [rows, groups]
        team.share(rows * groups, [&](int64_t i, int64_t to) {
            for (; i < to; i++) sums[i] = group_sum(x + i / groups * inputs + i % groups * group, group, m.in_pairs);
        });
    }
    team.share((panels + 1) / 2, [&](int64_t from, int64_t to) {  // pairs of panels stay together
        const int64_t last = std::min(panels, 2 * to);
        if (m.in_pairs)
            run<true>(w, 2 * from, last, pairs, sums, rows, m.bias, out);
        else
            run<false>(w, 2 * from, last, x, sums, rows, m.bias, out);
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
            else
                *out = (read<uint32_t>(codes + (i / 8 * WIDTH + lane) * 4) >> i % 8 * 4 & 15u) ^ 8u;
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

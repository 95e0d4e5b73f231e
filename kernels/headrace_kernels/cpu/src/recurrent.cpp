// Layers with recurrent state: tokens in order, so that a result depends neither on where a sequence is split nor on its batch.
//
// The delta rule reads a state S [D, E] twice per token. The first pass makes key S and query S; from these follow the change
// of the token's value and the output, query (kept S + key change) = kept (query S) + (query key) change. The second pass
// writes kept S + key change. Columns of S do not depend on each other: a block of them stays in the first cache over all tokens.
#include <algorithm>
#include <cmath>
#include <memory>

#include "entries.h"
#include "sequences.h"
#include "vector.h"

namespace {

inline float widened(float x) { return x; }
inline float widened(uint16_t x) {  // bfloat16
    const uint32_t bits = (uint32_t)x << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, uint16_t* to) {  // to the nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// n of 16 numbers; the others are 0.
template <class T> inline floats load_some(const T* from, int64_t n) {
    float numbers[WIDTH]{};
    for (int64_t i = 0; i < n; i++) numbers[i] = widened(from[i]);
    return load(numbers);
}

template <class T> inline void store_some(T* to, floats x, int64_t n) {
    float numbers[WIDTH];
    store(numbers, x);
    for (int64_t i = 0; i < n; i++) narrow(numbers[i], to + i);
}

// x [tokens, channels], taps [width, channels], pool [slots, width - 1, channels]
template <class T> struct Convolution {
    T* out;
    const T* x;
    int64_t stride;
    const T *taps, *bias;  // bias may be null
    T* pool;
    int64_t tokens, channels, width;
    bool activated;

    // The input `before` tokens before the i-th of a sequence whose first is `first`.
    const T* input(const T* state, int64_t first, int64_t i, int64_t before) const {
        return i >= before ? x + (first + i - before) * stride : state + (width - 1 + i - before) * channels;
    }

    void token(const T* state, int64_t first, int64_t i) const {
        T* to = out + (first + i) * channels;
        const auto block = [&](int64_t c, int64_t n) {
            floats total = bias ? load_some(bias + c, n) : floats{};
            for (int64_t w = 0; w < width; w++)
                total = multiply_add(load_some(input(state, first, i, width - 1 - w) + c, n),
                                     load_some(taps + w * channels + c, n), total);
            store_some(to + c, activated ? silu(total) : total, n);
        };
        int64_t c = 0;
        for (; c + WIDTH <= channels; c += WIDTH) block(c, WIDTH);
        if (c < channels) block(c, channels - c);
    }

    void run(Team& team, const Sequences& sequences) const {
        const int64_t size = (width - 1) * channels;
        if (team.rank == 0) sequences.clear_others(out, tokens, channels);
        auto [from, to] = team.part(tokens);
        for (int64_t s = 0, next; s < sequences.count; s = next) {
            next = sequences.end(s);
            const int64_t first = sequences.starts[s], last = std::min<int64_t>(to, sequences.starts[next]);
            for (int64_t t = std::max(from, first); t < last; t++) token(pool + sequences.reads[s] * size, first, t - first);
        }
        team.wait();  // a state is overwritten when all outputs have read it
        team.share(sequences.count, [&](int64_t s, int64_t end) {
            for (; s < end; s++) {
                if (sequences.continues(s)) continue;
                const T* state = pool + sequences.reads[s] * size;
                for (int64_t p = sequences.end(s) - 1; p >= s; p--) {  // the first piece may overwrite the state
                    if (sequences.empty(p) || !sequences.writes[p]) continue;
                    const int64_t first = sequences.starts[s], count = sequences.starts[p + 1] - first;
                    for (int64_t j = 0; j < width - 1; j++) {  // a row moves towards the front
                        const T* row = input(state, first, count + j, width - 1);
                        std::memmove(pool + sequences.writes[p] * size + j * channels, row, channels * sizeof(T));
                    }
                }
            }
        });
    }
};

constexpr int COLUMNS = 2 * WIDTH, REGISTERS = COLUMNS / LANES;

// Rows of COLUMNS columns of a state.
template <class T> struct Block {
    T* data;
    int64_t stride;
};

// One token of a head. key, query [D]: what the state is multiplied by in the first pass.
struct Token {
    const float *read_key, *read_query, *key;
    const float* kept;  // [D], or one number for all rows
    float beta, dot;
};

// Not inlined: compilers keep the sums of a loop that is part of a larger function in memory.
template <bool BY_CHANNEL>
__attribute__((noinline)) void apply(const Token& token, int64_t rows, Block<const float> from, Block<float> to,
                                     const float* value, float* out) {
    float_register found[REGISTERS]{}, seen[REGISTERS]{};
    for (int64_t i = 0; i < rows; i++) {
        const float_register key = token.read_key[i] - float_register{}, query = token.read_query[i] - float_register{};
        for (int r = 0; r < REGISTERS; r++) {
            const float_register state = read<float_register>(from.data + i * from.stride + r * LANES);
            found[r] = multiply_add(key, state, found[r]);
            seen[r] = multiply_add(query, state, seen[r]);
        }
    }
    const float one = BY_CHANNEL ? 1.f : *token.kept;
    float_register change[REGISTERS];
    for (int r = 0; r < REGISTERS; r++) {
        change[r] = (read<float_register>(value + r * LANES) - found[r] * one) * token.beta;
        const float_register result = multiply_add(change[r], token.dot - float_register{}, seen[r] * one);
        std::memcpy(out + r * LANES, &result, sizeof result);
    }
    const float *keys = token.key, *factors = token.kept;
    float_register kept = factors[0] - float_register{};
    for (int64_t i = 0; i < rows; i++) {
        const float_register key = keys[i] - float_register{};
        if (BY_CHANNEL) kept = factors[i] - float_register{};
        for (int r = 0; r < REGISTERS; r++) {
            const float_register state = read<float_register>(from.data + i * from.stride + r * LANES) * kept;
            const float_register next = multiply_add(key, change[r], state);
            std::memcpy(to.data + i * to.stride + r * LANES, &next, sizeof next);
        }
    }
}

// query, key [tokens, K, D] and value [tokens, H, E] with their strides of tokens, decay [tokens, H] or [tokens, H, D],
// beta [tokens, H], pool [slots, H, D, E]
struct Rule {
    float* out;
    const float *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;
    const float *decay, *beta;
    float* pool;
    int64_t tokens, key_heads, heads, rows, columns;
    bool by_channel;
    float *normed, *dots, *kept;  // [K, tokens, 2, D]: query and key; [K, tokens]; as decay

    int64_t kept_size() const { return by_channel ? rows : 1; }

    // Query and key of one head, divided by their norms, and their product.
    void prepare(int64_t token, int64_t head) const {
        float *q = normed + (head * tokens + token) * 2 * rows, *k = q + rows;
        scale(q, query + token * query_stride + head * rows, 1.f / std::sqrt((float)rows));
        scale(k, key + token * key_stride + head * rows, 1.f);
        dots[head * tokens + token] = product(q, k);
    }

    float product(const float* x, const float* y) const {
        floats total{};
        for (int64_t i = 0; i < rows; i += WIDTH) {
            const int64_t n = std::min<int64_t>(WIDTH, rows - i);
            total = multiply_add(load_some(x + i, n), load_some(y + i, n), total);
        }
        return sum(total);
    }

    void scale(float* to, const float* x, float factor) const {
        factor *= 1.f / std::sqrt(product(x, x) + 1e-6f);
        for (int64_t i = 0; i < rows; i++) to[i] = x[i] * factor;
    }

    // Some tokens of one sequence and head. space: (D + 2) * COLUMNS + 2 * D floats.
    template <bool BY_CHANNEL> void run(const Sequences& sequences, int64_t s, int64_t head, float* space) const {
        const int64_t start = sequences.starts[s], stop = sequences.starts[s + 1], group = heads / key_heads;
        const float* from = pool + (sequences.reads[s] * heads + head) * rows * columns;
        float* to = pool + (sequences.writes[s] * heads + head) * rows * columns;
        float *own = space, *value_part = own + rows * COLUMNS, *out_part = value_part + COLUMNS, *scaled = out_part + COLUMNS;
        for (int64_t first = 0; first < columns; first += COLUMNS) {
            const int64_t n = std::min<int64_t>(COLUMNS, columns - first);
            if (n < COLUMNS)
                for (int64_t i = 0; i < rows; i++) {
                    std::fill(own + i * COLUMNS + n, own + (i + 1) * COLUMNS, 0.f);
                    std::copy_n(from + i * columns + first, n, own + i * COLUMNS);
                }
            for (int64_t t = start; t < stop; t++) {
                const int64_t row = head / group * tokens + t;
                const float *q = normed + row * 2 * rows, *k = q + rows;
                Token token{k, q, k, kept + (t * heads + head) * kept_size(), beta[t * heads + head], dots[row]};
                if (BY_CHANNEL) {
                    for (int64_t i = 0; i < rows; i++) scaled[i] = k[i] * token.kept[i];
                    for (int64_t i = 0; i < rows; i++) scaled[rows + i] = q[i] * token.kept[i];
                    token.read_key = scaled, token.read_query = scaled + rows;
                }
                const float* v = value + t * value_stride + head * columns + first;
                float* o = out + (t * heads + head) * columns + first;
                Block<const float> source{own, COLUMNS};
                Block<float> target{own, COLUMNS};
                if (n == COLUMNS) {
                    if (t == start) source = {from + first, columns};
                    if (t == stop - 1 && sequences.writes[s]) target = {to + first, columns};
                    apply<BY_CHANNEL>(token, rows, source, target, v, o);
                    continue;
                }
                std::fill(value_part, out_part, 0.f);
                std::copy_n(v, n, value_part);
                apply<BY_CHANNEL>(token, rows, source, target, value_part, out_part);
                std::copy_n(out_part, n, o);
            }
            if (n < COLUMNS && sequences.writes[s])
                for (int64_t i = 0; i < rows; i++) std::copy_n(own + i * COLUMNS, n, to + i * columns + first);
        }
    }

    void run(Team& team, const Sequences& sequences) const {
        team.share(tokens, [&](int64_t t, int64_t to) {
            const int64_t size = heads * kept_size();
            for (int64_t i = t * size; i < to * size; i += WIDTH) {
                const int64_t n = std::min<int64_t>(WIDTH, to * size - i);
                store_some(kept + i, exponential(load_some(decay + i, n)), n);
            }
            for (; t < to; t++)
                for (int64_t h = 0; h < key_heads; h++) prepare(t, h);
        });
        if (team.rank == 0) sequences.clear_others(out, tokens, heads * columns);
        const std::unique_ptr<float[]> space(new float[(rows + 2) * COLUMNS + 2 * rows]);
        team.take(sequences.count * heads, [&](int64_t i) {
            const int64_t s = i / heads, h = i % heads;
            if (sequences.continues(s)) return;
            for (int64_t p = s; p < sequences.end(s); p++)
                if (!sequences.empty(p))
                    by_channel ? run<true>(sequences, p, h, space.get()) : run<false>(sequences, p, h, space.get());
        });
    }
};

template <class T>
void convolve(void* out, const void* x, int64_t stride, const void* taps, const void* bias, void* pool, int64_t tokens,
              int64_t channels, int64_t width, bool silu, const Sequences& sequences, int64_t threads) {
    const Convolution<T> convolution{(T*)out, (const T*)x, stride, (const T*)taps, (const T*)bias, (T*)pool,
                                     tokens,  channels,    width,  silu};
    run_team(threads_for(tokens * channels * width, 1 << 17, (int)threads),
             [&](Team& team) { convolution.run(team, sequences); });
}

}  // namespace

extern "C" int64_t headrace_causal_conv(void* out, const void* x, int64_t stride, const void* taps, const void* bias, void* pool,
                                        int64_t slots, int64_t tokens, int64_t channels, int64_t width, int64_t silu,
                                        int64_t bfloat16, const int32_t* starts, const int32_t* reads, const int32_t* writes,
                                        int64_t count, int64_t threads) {
    const Sequences sequences{starts, reads, writes, count};
    if (const int64_t status = sequences.check(tokens, slots)) return status;
    (bfloat16 ? convolve<uint16_t> : convolve<float>)(out, x, stride, taps, bias, pool, tokens, channels, width, silu, sequences,
                                                      threads);
    return 0;
}

extern "C" int64_t headrace_delta_rule(float* out, const float* query, int64_t query_stride, const float* key, int64_t key_stride,
                                       const float* value, int64_t value_stride, const float* decay, int64_t by_channel,
                                       const float* beta, float* pool, int64_t slots, int64_t tokens, int64_t key_heads,
                                       int64_t heads, int64_t rows, int64_t columns, const int32_t* starts,
                                       const int32_t* reads, const int32_t* writes, int64_t count, int64_t threads) {
    const Sequences sequences{starts, reads, writes, count};
    if (const int64_t status = sequences.check(tokens, slots)) return status;
    const int64_t pairs = tokens * key_heads, kept = tokens * heads * (by_channel ? rows : 1);
    const std::unique_ptr<float[]> space(new float[pairs * (2 * rows + 1) + kept]);
    float *normed = space.get(), *dots = normed + pairs * 2 * rows;
    const Rule rule{out, query, key, value, query_stride, key_stride, value_stride, decay, beta, pool, tokens, key_heads, heads,
                    rows, columns, by_channel != 0, normed, dots, dots + pairs};
    run_team(threads_for(tokens * heads * rows * columns, 1 << 17, (int)threads),
             [&](Team& team) { rule.run(team, sequences); });
    return 0;
}

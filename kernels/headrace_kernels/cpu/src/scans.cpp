// State space models over slots, token by token, and their gated norm, in float32: a row's bits depend on its sequence alone.
// Rows may have any stride. Where sizes are no multiples of a vector, the rest is computed in a vector, too.
#include <algorithm>
#include <vector>

#include "entries.h"
#include "sequences.h"
#include "vector.h"

namespace {

constexpr int64_t GRAIN = 1 << 15;  // state elements and tokens per thread

inline floats load_part(const float* from, int64_t n) {
    if (n >= WIDTH) return load(from);
    floats x{};
    std::memcpy(&x, from, n * sizeof(float));
    return x;
}

inline void store_part(float* to, floats x, int64_t n) {
    if (n >= WIDTH)
        store(to, x);
    else
        std::memcpy(to, &x, n * sizeof(float));
}

inline floats bounded(floats x, float low, float high) {
    x = pick(x < spread(low), spread(low), x);
    return pick(x > spread(high), spread(high), x);
}

// Of each token a row of `stride` numbers.
struct Rows {
    const float* data;
    int64_t stride;

    const float* operator[](int64_t token) const { return data + token * stride; }
};

// state = kept * state + added * key; returns state . query. `from` and `to` are of `size` numbers and may be the same.
template <class Kept>
inline float advance(const float* from, float* to, floats added, const float* key, const float* query, int64_t size, Kept kept) {
    floats total{};
    int64_t d = 0;
    for (; d + WIDTH <= size; d += WIDTH) {
        const floats state = multiply_add(added, load(key + d), load(from + d) * kept(d, WIDTH));
        store(to + d, state);
        total = multiply_add(state, load(query + d), total);
    }
    if (const int64_t n = size - d) {
        const floats state = multiply_add(added, load_part(key + d, n), load_part(from + d, n) * kept(d, n));
        store_part(to + d, state, n);
        total = multiply_add(state, load_part(query + d, n), total);
    }
    return sum(total);
}

// Calls work(sequence, part, from, to) for every part of the states of every sequence with tokens: `from` and `to` are its
// numbers in the slots; `to` is space of the thread where the new state is not kept.
template <class Work>
void run_parts(const Sequences& sequences, float* pool, int64_t parts, int64_t part_size, int64_t slot_size, int64_t space_size,
               int64_t tokens, int64_t threads, Work work) {
    run_team(threads_for(tokens * slot_size, GRAIN, (int)threads), [&](Team& team) {
        std::vector<float> space(space_size);
        team.take(sequences.count * parts, [&](int64_t item) {
            const int64_t s = item / parts, part = item % parts;
            if (sequences.continues(s)) return;
            const int64_t offset = part * part_size;
            for (int64_t p = s; p < sequences.end(s); p++) {
                if (sequences.empty(p)) continue;
                float* to = sequences.writes[p] ? pool + sequences.writes[p] * slot_size + offset : space.data();
                work(p, part, pool + sequences.reads[p] * slot_size + offset, to);
            }
        });
    });
}

}  // namespace

// Mamba-2: x and out [tokens, heads, channels], dt [tokens, heads], key and query [tokens, groups, size], decay, skip and bias
// [heads], skip and bias may be null; pool [slots, heads, channels, size].
extern "C" int64_t headrace_ssd(float* out, const float* x, int64_t x_stride, const float* dt, int64_t dt_stride,
                                const float* decay, const float* key, int64_t key_stride, const float* query,
                                int64_t query_stride, const float* skip, const float* bias, float low, float high, float* pool,
                                int64_t slots, const int32_t* starts, const int32_t* reads, const int32_t* writes, int64_t count,
                                int64_t tokens, int64_t heads, int64_t channels, int64_t groups, int64_t size, int64_t threads) {
    const Sequences sequences{starts, reads, writes, count};
    if (const int64_t status = sequences.check(tokens, slots)) return status;
    const Rows xs{x, x_stride}, dts{dt, dt_stride}, keys{key, key_stride}, queries{query, query_stride};
    const int64_t head_size = channels * size;
    run_parts(sequences, pool, heads, head_size, heads * head_size, head_size, tokens, threads,
              [&](int64_t s, int64_t h, const float* from, float* to) {
                  const int64_t group = h / (heads / groups) * size;
                  for (int64_t t = starts[s]; t < starts[s + 1]; t++, from = to) {
                      const floats step = bounded(softplus(spread(dts[t][h] + (bias ? bias[h] : 0.f))), low, high);
                      const floats kept = exponential(step * decay[h]);
                      const float* inputs = xs[t] + h * channels;
                      float* outputs = out + (t * heads + h) * channels;
                      for (int64_t e = 0; e < channels; e++) {
                          const float y = advance(from + e * size, to + e * size, step * inputs[e], keys[t] + group,
                                                  queries[t] + group, size, [&](int64_t, int64_t) { return kept; });
                          outputs[e] = skip ? y + skip[h] * inputs[e] : y;
                      }
                  }
              });
    return 0;
}

// Mamba-1: x, dt, gate and out [tokens, channels], key and query [tokens, size], decay [channels, size], skip and bias
// [channels]; gate, skip and bias may be null; pool [slots, channels, size].
extern "C" int64_t headrace_selective_scan(float* out, const float* x, int64_t x_stride, const float* dt, int64_t dt_stride,
                                           const float* decay, const float* key, int64_t key_stride, const float* query,
                                           int64_t query_stride, const float* skip, const float* gate, int64_t gate_stride,
                                           const float* bias, float* pool, int64_t slots, const int32_t* starts,
                                           const int32_t* reads, const int32_t* writes, int64_t count, int64_t tokens,
                                           int64_t channels, int64_t size, int64_t threads) {
    const Sequences sequences{starts, reads, writes, count};
    if (const int64_t status = sequences.check(tokens, slots)) return status;
    const Rows xs{x, x_stride}, dts{dt, dt_stride}, keys{key, key_stride}, queries{query, query_stride}, gates{gate, gate_stride};
    const int64_t parts = (channels + WIDTH - 1) / WIDTH;
    run_parts(sequences, pool, parts, WIDTH * size, channels * size, WIDTH * size, tokens, threads,
              [&](int64_t s, int64_t part, const float* from, float* to) {
                  const int64_t c = part * WIDTH, n = channels - c;
                  const float* rates = decay + c * size;
                  for (int64_t t = starts[s]; t < starts[s + 1]; t++, from = to) {
                      floats wide = load_part(dts[t] + c, n);
                      if (bias) wide = wide + load_part(bias + c, n);
                      wide = softplus(wide);
                      const floats inputs = load_part(xs[t] + c, n);
                      float step[WIDTH], added[WIDTH], totals[WIDTH] = {};
                      store(step, wide);
                      store(added, wide * inputs);
                      for (int64_t i = 0; i < std::min<int64_t>(n, WIDTH); i++)
                          totals[i] = advance(from + i * size, to + i * size, spread(added[i]), keys[t], queries[t], size,
                                              [&](int64_t d, int64_t rest) {
                                                  return exponential(step[i] * load_part(rates + i * size + d, rest));
                                              });
                      floats y = load(totals);
                      if (skip) y = multiply_add(load_part(skip + c, n), inputs, y);
                      if (gate) y = y * silu(load_part(gates[t] + c, n));
                      store_part(out + t * channels + c, y, n);
                  }
              });
    return 0;
}

// out = norm(x * silu(gate)), or norm(x) * silu(gate), for groups of `group` numbers of each row of n; weight [n].
extern "C" void headrace_gated_rms_norm(float* out, const float* x, int64_t x_stride, const float* gate, int64_t gate_stride,
                                        const float* weight, int64_t rows, int64_t n, int64_t group, float eps,
                                        int64_t gate_first, int64_t threads) {
    const Rows xs{x, x_stride}, gates{gate, gate_stride};
    run_team(threads_for(rows * n, GRAIN, (int)threads), [&](Team& team) {
        team.share(rows, [&](int64_t r, int64_t to) {
            for (; r < to; r++) {
                float* row = out + r * n;
                const auto multiply = [&](const float* from) {
                    for (int64_t i = 0; i < n; i += WIDTH)
                        store_part(row + i, load_part(from + i, n - i) * silu(load_part(gates[r] + i, n - i)), n - i);
                };
                if (gate_first) multiply(xs[r]);
                const float* normed = gate_first ? row : xs[r];
                for (int64_t i = 0; i < n; i += group) norm_row(row + i, normed + i, weight + i, group, eps);
                if (!gate_first) multiply(row);
            }
        });
    });
}

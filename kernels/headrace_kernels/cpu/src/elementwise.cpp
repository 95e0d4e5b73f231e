// Norms, activations and rotary embedding in float32. Rows are contiguous and may have any stride.
#include <cmath>

#include "entries.h"
#include "vector.h"

namespace {

constexpr Branch PLAIN{nullptr, 0., 1.};
constexpr int64_t GRAIN = 1 << 17;  // elements per thread: waking one takes about 40 us where waiting threads sleep

// The sum of squares; lanes first, so that its order depends on n alone.
inline float sum_of_squares(const float* x, int64_t n) {
    floats acc{};
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) acc = multiply_add(load(x + i), load(x + i), acc);
    float rest = 0.f;
    for (; i < n; i++) rest += x[i] * x[i];
    return sum(acc) + rest;
}

}  // namespace

void norm_row(float* out, const float* x, const float* weight, int64_t n, float eps) {
    const float factor = 1.f / std::sqrt(sum_of_squares(x, n) / n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * factor * weight[i];
}

void add_row(float* total, const float* x, const float* residual, int64_t n, const Branch& branch) {
    const float factor = (float)branch.factor;
    const float scale = branch.norm ? 1.f / std::sqrt(sum_of_squares(x, n) / n + (float)branch.eps) : 1.f;
    for (int64_t i = 0; i < n; i++) {
        float value = x[i];
        if (branch.norm) value = value * scale * branch.norm[i];
        if (factor != 1.f) value *= factor;
        total[i] = value + residual[i];
    }
}

void add_norm(Team& team, float* out, float* total, const float* x, int64_t x_stride, const float* residual,
              int64_t residual_stride, const Branch& branch, const float* weight, int64_t rows, int64_t n, float eps) {
    team.share(rows, [&](int64_t r, int64_t to) {
        for (; r < to; r++) {
            const float* from = x + r * x_stride;
            if (residual) {
                add_row(total + r * n, from, residual + r * residual_stride, n, branch);
                from = total + r * n;
            }
            norm_row(out + r * n, from, weight, n, eps);
        }
    });
}

void rotate_heads(float* x, int64_t stride, int64_t heads, const float* cos, const float* sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t h = 0; h < heads; h++, x += stride)
        for (int64_t d = 0; d < half; d++) {
            const float a = x[d], b = x[d + half];
            x[d] = a * cos[d] - b * sin[d];
            x[d + half] = b * cos[d + half] + a * sin[d + half];
        }
}

template <class Function>
inline void activate_rows(float* out, const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t from,
                          int64_t to, int64_t n, Function function) {
    for (int64_t r = from; r < to; r++) {
        const float *g = gate + r * gate_stride, *u = up + r * up_stride;
        float* o = out + r * n;
        int64_t i = 0;
        for (; i + WIDTH <= n; i += WIDTH) store(o + i, function(load(g + i), load(u + i)));
        if (i < n) {
            floats x{}, y{};
            std::memcpy(&x, g + i, (n - i) * sizeof(float));
            std::memcpy(&y, u + i, (n - i) * sizeof(float));
            x = function(x, y);
            std::memcpy(o + i, &x, (n - i) * sizeof(float));
        }
    }
}

void activate(Team& team, float* out, const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t rows,
              int64_t n, int64_t activation) {
    team.share(rows, [&](int64_t from, int64_t to) {
        const auto run = [&](auto function) { activate_rows(out, gate, gate_stride, up, up_stride, from, to, n, function); };
        if (activation == SILU)
            run([](floats x, floats y) { return silu(x) * y; });
        else
            run([](floats x, floats y) {
                return 0.5f * x * (1.f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x))) * y;
            });
    });
}

extern "C" void headrace_rms_norm(float* out, const float* x, int64_t x_stride, const float* weight, int64_t rows,
                                  int64_t n, float eps, int64_t threads) {
    run_team(threads_for(rows * n, GRAIN, (int)threads),
             [&](Team& team) { add_norm(team, out, nullptr, x, x_stride, nullptr, 0, PLAIN, weight, rows, n, eps); });
}

extern "C" void headrace_add_rms_norm(float* out, float* total, const float* x, int64_t x_stride, const float* residual,
                                      int64_t residual_stride, const float* weight, int64_t rows, int64_t n, float eps,
                                      int64_t threads) {
    run_team(threads_for(rows * n, GRAIN, (int)threads), [&](Team& team) {
        add_norm(team, out, total, x, x_stride, residual, residual_stride, PLAIN, weight, rows, n, eps);
    });
}

extern "C" void headrace_activate(float* out, const float* gate, int64_t gate_stride, const float* up, int64_t up_stride,
                                  int64_t rows, int64_t n, int64_t activation, int64_t threads) {
    run_team(threads_for(rows * n, GRAIN / 2, (int)threads),
             [&](Team& team) { activate(team, out, gate, gate_stride, up, up_stride, rows, n, activation); });
}

// softplus; else the sigmoid
extern "C" void headrace_curve(float* out, const float* x, int64_t x_stride, int64_t rows, int64_t n, int64_t is_softplus,
                               int64_t threads) {
    run_team(threads_for(rows * n, GRAIN / 2, (int)threads), [&](Team& team) {
        team.share(rows, [&](int64_t from, int64_t to) {
            const auto run = [&](auto curve) { activate_rows(out, x, x_stride, x, x_stride, from, to, n, curve); };
            if (is_softplus)
                run([](floats x, floats) { return softplus(x); });
            else
                run([](floats x, floats) { return 1.f / (1.f + exponential(-x)); });
        });
    });
}

extern "C" void headrace_rope(float* query, int64_t query_token_stride, int64_t query_head_stride, int64_t heads,
                              float* key, int64_t key_token_stride, int64_t key_head_stride, int64_t kv_heads,
                              const float* cos, int64_t cos_stride, const float* sin, int64_t sin_stride, int64_t tokens,
                              int64_t rotary_dim, int64_t threads) {
    run_team(threads_for(tokens * (heads + kv_heads) * rotary_dim, GRAIN, (int)threads), [&](Team& team) {
        team.share(tokens, [&](int64_t t, int64_t to) {
            for (; t < to; t++) {
                const float *c = cos + t * cos_stride, *s = sin + t * sin_stride;
                rotate_heads(query + t * query_token_stride, query_head_stride, heads, c, s, rotary_dim);
                rotate_heads(key + t * key_token_stride, key_head_stride, kv_heads, c, s, rotary_dim);
            }
        });
    });
}

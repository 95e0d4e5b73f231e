// Norms, silu * up and rotary embedding in float32. Rows are contiguous and may have any stride.
#include <cmath>

#include "entries.h"
#include "vector.h"

namespace {

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

inline void scale_row(float* out, const float* x, const float* weight, int64_t n, float eps) {
    const float factor = 1.f / std::sqrt(sum_of_squares(x, n) / n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * factor * weight[i];
}

inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t d = 0; d < half; d++) {
        const float a = x[d], b = x[d + half];
        x[d] = a * cos[d] - b * sin[d];
        x[d + half] = b * cos[d + half] + a * sin[d + half];
    }
}

}  // namespace

extern "C" void headrace_rms_norm(float* out, const float* x, int64_t x_stride, const float* weight, int64_t rows,
                                  int64_t n, float eps, int64_t threads) {
    const int team = threads_for(rows * n, GRAIN, (int)threads);
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t r = 0; r < rows; r++) scale_row(out + r * n, x + r * x_stride, weight, n, eps);
}

extern "C" void headrace_add_rms_norm(float* out, float* total, const float* x, int64_t x_stride, const float* residual,
                                      int64_t residual_stride, const float* weight, int64_t rows, int64_t n, float eps,
                                      int64_t threads) {
    const int team = threads_for(rows * n, GRAIN, (int)threads);
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < n; i++) total[r * n + i] = x[r * x_stride + i] + residual[r * residual_stride + i];
        scale_row(out + r * n, total + r * n, weight, n, eps);
    }
}

extern "C" void headrace_silu_mul(float* out, const float* gate, int64_t gate_stride, const float* up, int64_t up_stride,
                                  int64_t rows, int64_t n, int64_t threads) {
    const int team = threads_for(rows * n, GRAIN / 2, (int)threads);
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t r = 0; r < rows; r++) {
        const float *g = gate + r * gate_stride, *u = up + r * up_stride;
        float* o = out + r * n;
        int64_t i = 0;
        for (; i + WIDTH <= n; i += WIDTH) {
            floats x = load(g + i);
            store(o + i, x / (1.f + exponential(-x)) * load(u + i));
        }
        if (i < n) {
            floats x{}, y{};
            std::memcpy(&x, g + i, (n - i) * sizeof(float));
            std::memcpy(&y, u + i, (n - i) * sizeof(float));
            x = x / (1.f + exponential(-x)) * y;
            std::memcpy(o + i, &x, (n - i) * sizeof(float));
        }
    }
}

extern "C" void headrace_rope(float* query, int64_t query_token_stride, int64_t query_head_stride, int64_t heads,
                              float* key, int64_t key_token_stride, int64_t key_head_stride, int64_t kv_heads,
                              const float* cos, int64_t cos_stride, const float* sin, int64_t sin_stride, int64_t tokens,
                              int64_t rotary_dim, int64_t threads) {
    const int team = threads_for(tokens * (heads + kv_heads) * rotary_dim, GRAIN, (int)threads);
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cos + t * cos_stride, *s = sin + t * sin_stride;
        for (int64_t h = 0; h < heads; h++)
            rotate(query + t * query_token_stride + h * query_head_stride, c, s, rotary_dim / 2);
        for (int64_t h = 0; h < kv_heads; h++)
            rotate(key + t * key_token_stride + h * key_head_stride, c, s, rotary_dim / 2);
    }
}

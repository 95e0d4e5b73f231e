// Adjacent decoder layers in one call: the operations of `FusedLayer`, in its order and with its bits.
#include "entries.h"

// Both structures are filled by `layers.py`, field by field.
struct Matrix {
    const uint8_t* data;
    const float* bias;
    int64_t outputs, inputs, form, group, wide, minima, in_pairs;
    double offset;
};

struct Layer {
    Matrix qkv, out, gate_up, down;
    const float *first_norm, *second_norm, *query_norm, *key_norm, *sinks;  // the last three may be null
    int64_t heads, kv_heads, head_dim;
    double first_eps, second_eps, query_eps, key_eps, scale, softcap;
};

// What a step has for one layer.
struct Cache {
    float* pool;
    int64_t pool_blocks, block_size, window;
    const int32_t *query_starts, *seq_lens, *tables;
    int64_t table_stride, table_entries, sequences;
    const int64_t* slots;
};

namespace {

void multiply(const Matrix& w, const float* x, int64_t rows, float* out, int64_t threads) {
    headrace_packed_matmul(out, x, rows, w.data, w.outputs, w.inputs, w.form, w.group, w.wide, w.minima, (float)w.offset,
                           w.bias, w.in_pairs, threads);
}

}  // namespace

extern "C" int64_t headrace_layer_bytes() { return sizeof(Layer) + sizeof(Cache); }

// hidden [rows, N] is replaced by the last layer's; qkv [layers, rows, (H + 2K) * D] keeps each layer's values.
// space: of the largest layer, rows * (2N + H * D + 2M + M) floats, M being the inputs of `down`.
extern "C" int64_t headrace_layers(float* hidden, float* qkv, float* space, const Layer* layers, const Cache* caches,
                                   int64_t count, const float* cos, int64_t cos_stride, const float* sin, int64_t sin_stride,
                                   int64_t rotary_dim, int64_t rows, int64_t threads) {
    for (int64_t i = 0; i < count; i++) {
        const Layer& layer = layers[i];
        const Cache& cache = caches[i];
        const int64_t n = layer.qkv.inputs, d = layer.head_dim, heads = layer.heads, kv_heads = layer.kv_heads;
        const int64_t width = layer.qkv.outputs, middle = layer.down.inputs;
        float *normed = space, *total = normed + rows * n, *attended = total + rows * n;
        float *gate_up = attended + rows * heads * d, *activated = gate_up + rows * 2 * middle;
        float *query = qkv, *key = qkv + heads * d, *value = key + kv_heads * d;
        headrace_rms_norm(normed, hidden, n, layer.first_norm, rows, n, (float)layer.first_eps, threads);
        multiply(layer.qkv, normed, rows, qkv, threads);
        if (layer.query_norm)
            for (int64_t r = 0; r < rows; r++) {
                float *q = query + r * width, *k = key + r * width;
                headrace_rms_norm(q, q, d, layer.query_norm, heads, d, (float)layer.query_eps, 1);
                headrace_rms_norm(k, k, d, layer.key_norm, kv_heads, d, (float)layer.key_eps, 1);
            }
        headrace_rope(query, width, d, heads, key, width, d, kv_heads, cos, cos_stride, sin, sin_stride, rows, rotary_dim,
                      threads);
        if (const int64_t status = headrace_write_kv(key, width, d, value, width, d, cache.pool, cache.pool_blocks,
                                                     cache.slots, rows, kv_heads, d, cache.block_size, threads))
            return status;
        if (const int64_t status = headrace_attention(
                attended, query, width, d, cache.pool, cache.pool_blocks, cache.query_starts, cache.seq_lens, cache.tables,
                cache.table_stride, cache.table_entries, cache.sequences, rows, heads, kv_heads, d, cache.block_size,
                (float)layer.scale, cache.window, (float)layer.softcap, layer.sinks, threads))
            return status;
        multiply(layer.out, attended, rows, normed, threads);
        headrace_add_rms_norm(normed, total, normed, n, hidden, n, layer.second_norm, rows, n, (float)layer.second_eps,
                              threads);
        multiply(layer.gate_up, normed, rows, gate_up, threads);
        headrace_silu_mul(activated, gate_up, 2 * middle, gate_up + middle, 2 * middle, rows, middle, threads);
        multiply(layer.down, activated, rows, normed, threads);
        for (int64_t j = 0; j < rows * n; j++) hidden[j] = total[j] + normed[j];
        qkv += rows * width;
    }
    return 0;
}

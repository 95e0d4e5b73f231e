// Adjacent decoder layers in one call and one team of threads: the operations of `FusedLayer`, in its order and with its bits.
#include <algorithm>
#include <vector>

#include "entries.h"
#include "vector.h"

// Both structures are filled by `layers.py`, field by field.
struct Layer {
    Matrix qkv, out, gate_up, down;
    Branch attention, mlp;
    const float *first_norm, *second_norm, *query_norm, *key_norm, *sinks;  // the last three may be null
    int64_t heads, kv_heads, head_dim, activation;
    double first_eps, second_eps, query_eps, key_eps, scale, softcap;
};

// Where a layer keeps keys and values, and what a step has for it.
struct Cache {
    float *keys, *values;
    int64_t pool_blocks, block_stride, block_size, window;
    const int32_t *query_starts, *seq_lens, *tables;
    int64_t table_stride, table_entries, sequences;
    const int64_t* slots;
};

namespace {

// Angles of the step's tokens.
struct Rotary {
    const float *cos, *sin;
    int64_t cos_stride, sin_stride, dim;
};

Part part_of(const Layer& layer, const Cache& cache, float* data) {
    return {data, cache.block_stride, cache.block_size * layer.head_dim, layer.head_dim};
}

Attention attention_of(const Layer& layer, const Cache& cache, float* out, const float* query, int64_t rows) {
    const int64_t d = layer.head_dim;
    return {out, query, layer.qkv.outputs, d, part_of(layer, cache, cache.keys), part_of(layer, cache, cache.values),
            cache.pool_blocks, cache.query_starts, cache.seq_lens, cache.tables, cache.table_stride, cache.table_entries,
            cache.sequences, rows, layer.heads, layer.kv_heads, d, d, cache.block_size, (float)layer.scale,
            (float)layer.softcap, cache.window, layer.sinks};
}

bool has_same_step(const Cache& a, const Cache& b) {
    return a.slots == b.slots && a.tables == b.tables && a.window == b.window && a.pool_blocks == b.pool_blocks &&
           a.block_size == b.block_size;
}

// Norms and rotates queries and keys of each token, and writes keys and values to the pool.
void prepare_heads(Team& team, const Layer& layer, const Cache& cache, const Rotary& rotary, float* qkv, int64_t rows) {
    const int64_t d = layer.head_dim, heads = layer.heads, kv_heads = layer.kv_heads;
    const Part keys = part_of(layer, cache, cache.keys), values = part_of(layer, cache, cache.values);
    team.share(rows, [&](int64_t r, int64_t to) {
        for (; r < to; r++) {
            float *query = qkv + r * layer.qkv.outputs, *key = query + heads * d, *value = key + kv_heads * d;
            for (int64_t h = 0; layer.query_norm && h < heads; h++)
                norm_row(query + h * d, query + h * d, layer.query_norm, d, (float)layer.query_eps);
            for (int64_t h = 0; layer.key_norm && h < kv_heads; h++)
                norm_row(key + h * d, key + h * d, layer.key_norm, d, (float)layer.key_eps);
            const float *cos = rotary.cos + r * rotary.cos_stride, *sin = rotary.sin + r * rotary.sin_stride;
            rotate_heads(query, d, heads, cos, sin, rotary.dim);
            rotate_heads(key, d, kv_heads, cos, sin, rotary.dim);
            if (cache.slots[r] < 0) continue;
            write_slot(keys, key, d, cache.slots[r], kv_heads, d, cache.block_size);
            write_slot(values, value, d, cache.slots[r], kv_heads, d, cache.block_size);
        }
    });
}

}  // namespace

extern "C" int64_t headrace_layer_bytes() { return sizeof(Layer) + sizeof(Cache); }

// hidden [rows, N] is replaced by the last layer's; qkv [layers, rows, (H + 2K) * D] keeps each layer's values.
// space: of the largest layer, rows * (2N + H * D + 2M + M) floats, M being the inputs of `down`.
extern "C" int64_t headrace_layers(float* hidden, float* qkv, float* space, const Layer* layers, const Cache* caches,
                                   int64_t count, const float* cos, int64_t cos_stride, const float* sin, int64_t sin_stride,
                                   int64_t rotary_dim, int64_t rows, int64_t threads) {
    const Rotary rotary{cos, sin, cos_stride, sin_stride, rotary_dim};
    int64_t words = 0, work = 0;
    std::vector<AttentionPlan> plans;
    std::vector<int64_t> planned, plan_of(count);  // planned: the first layer of each plan
    for (int64_t i = 0; i < count; i++) {
        const Layer& layer = layers[i];
        const Cache& cache = caches[i];
        for (const Matrix* matrix : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) {
            words = std::max(words, matrix->words(rows));
            work = std::max(work, matrix->outputs * matrix->inputs * std::min<int64_t>(rows, 4));
        }
        size_t plan = 0;
        while (plan < plans.size() && !has_same_step(cache, caches[planned[plan]])) plan++;
        plan_of[i] = plan;
        if (plan == plans.size()) {
            if (const int64_t status = check_slots(cache.slots, rows, cache.pool_blocks * cache.block_size)) return status;
            const Attention attention = attention_of(layer, cache, nullptr, nullptr, rows);
            if (const int64_t status = check_attention(attention)) return status;
            plans.emplace_back(attention);
            planned.push_back(i);
        }
    }
    std::vector<uint32_t> shared(words);
    uint32_t* pairs = shared.data();
    run_team(threads_for(work, 1 << 16, (int)threads), [&](Team& team) {
        for (int64_t i = 0; i < count; i++) {
            const Layer& layer = layers[i];
            const int64_t n = layer.qkv.inputs, middle = layer.down.inputs, width = layer.heads * layer.head_dim;
            float *normed = space, *total = normed + rows * n, *attended = total + rows * n;
            float *gate_up = attended + rows * width, *activated = gate_up + rows * 2 * middle;
            float* heads = qkv + i * rows * layer.qkv.outputs;
            // The layer before leaves what it adds in `normed`, and what that is added to in `total`.
            const Branch& before = layers[i ? i - 1 : 0].mlp;
            add_norm(team, normed, hidden, i ? normed : hidden, n, i ? total : nullptr, n, before, layer.first_norm, rows, n,
                     (float)layer.first_eps);
            multiply_packed(team, layer.qkv, normed, rows, heads, pairs);
            prepare_heads(team, layer, caches[i], rotary, heads, rows);
            attend(team, attention_of(layer, caches[i], attended, heads, rows), plans[plan_of[i]]);
            multiply_packed(team, layer.out, attended, rows, normed, pairs);
            add_norm(team, normed, total, normed, n, hidden, n, layer.attention, layer.second_norm, rows, n,
                     (float)layer.second_eps);
            multiply_packed(team, layer.gate_up, normed, rows, gate_up, pairs);
            activate(team, activated, gate_up, 2 * middle, gate_up + middle, 2 * middle, rows, middle, layer.activation);
            multiply_packed(team, layer.down, activated, rows, normed, pairs);
        }
        const Layer& last = layers[count - 1];
        const int64_t n = last.qkv.inputs;
        const float *added = space, *total = added + rows * n;
        team.share(rows, [&](int64_t r, int64_t to) {
            for (; r < to; r++) add_row(hidden + r * n, added + r * n, total + r * n, n, last.mlp);
        });
    });
    return 0;
}

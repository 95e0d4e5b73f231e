// The functions that a decoder layer calls, which are also entries of the library.
#pragma once
#include <cstdint>

extern "C" {

int64_t headrace_attention(float* out, const float* query, int64_t query_token_stride, int64_t query_head_stride,
                           const float* pool, int64_t pool_blocks, const int32_t* query_starts, const int32_t* seq_lens,
                           const int32_t* tables, int64_t table_stride, int64_t table_entries, int64_t sequences,
                           int64_t query_tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                           float scale, int64_t window, float softcap, const float* sinks, int64_t threads);

int64_t headrace_write_kv(const float* key, int64_t key_token_stride, int64_t key_head_stride, const float* value,
                          int64_t value_token_stride, int64_t value_head_stride, float* pool, int64_t pool_blocks,
                          const int64_t* slots, int64_t tokens, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                          int64_t threads);

void headrace_rms_norm(float* out, const float* x, int64_t x_stride, const float* weight, int64_t rows, int64_t n, float eps,
                       int64_t threads);

void headrace_add_rms_norm(float* out, float* total, const float* x, int64_t x_stride, const float* residual,
                           int64_t residual_stride, const float* weight, int64_t rows, int64_t n, float eps,
                           int64_t threads);

void headrace_silu_mul(float* out, const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t rows,
                       int64_t n, int64_t threads);

void headrace_rope(float* query, int64_t query_token_stride, int64_t query_head_stride, int64_t heads, float* key,
                   int64_t key_token_stride, int64_t key_head_stride, int64_t kv_heads, const float* cos, int64_t cos_stride,
                   const float* sin, int64_t sin_stride, int64_t tokens, int64_t rotary_dim, int64_t threads);

void headrace_packed_matmul(float* out, const float* x, int64_t rows, const uint8_t* data, int64_t outputs, int64_t inputs,
                            int64_t form, int64_t group, int64_t wide, int64_t minima, float offset, const float* bias,
                            int64_t in_pairs, int64_t threads);
}

// The work of a decoder layer, in the order of its calls. All threads of a team call each function that takes one, share its
// work and return together.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "team.h"

// A packed weight [outputs, inputs] and what is done with its inputs. `layers.py` fills it, field by field.
struct Matrix {
    const uint8_t* data;
    const float* bias;
    int64_t outputs, inputs, form, group, wide, minima, in_pairs;
    double offset, centre;

    // Space of a product for `rows` rows that the team shares, in words of four bytes.
    int64_t words(int64_t rows) const { return rows * (inputs / (in_pairs ? 2 : 1) + inputs / group); }
};

// out = x @ weight.T + bias
void multiply_packed(Team& team, const Matrix& w, const float* x, int64_t rows, float* out, uint32_t* space);

// What is done with the result of attention or MLP before it is added: a norm, unless its weight is null, and a factor.
struct Branch {
    const float* norm;
    double eps, factor;
};

// total = branch(x) + residual. Of one row, by one thread; total may be one of the others.
void add_row(float* total, const float* x, const float* residual, int64_t n, const Branch& branch);

// total = branch(x) + residual, unless residual is null; out = norm(total), which may be x.
void add_norm(Team& team, float* out, float* total, const float* x, int64_t x_stride, const float* residual,
              int64_t residual_stride, const Branch& branch, const float* weight, int64_t rows, int64_t n, float eps);

// Of one row, by one thread.
void norm_row(float* out, const float* x, const float* weight, int64_t n, float eps);
void rotate_heads(float* x, int64_t stride, int64_t heads, const float* cos, const float* sin, int64_t rotary_dim);

enum Activation : int64_t { SILU, GELU };  // GELU: with the tangent

// out = activation(gate) * up
void activate(Team& team, float* out, const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t rows,
              int64_t n, int64_t activation);

// Keys or values of one layer [blocks, KV heads, positions, size]: floats from one block, head and position to the next.
// head = 0: all groups of query heads attend to the same one.
struct Part {
    float* data;
    int64_t block, head, row;

    float* at(int64_t number, int64_t kv_head, int64_t offset) const {
        return data + number * block + kv_head * head + offset * row;
    }
};

// Paged attention, see headrace_attention.
struct Attention {
    float* out;
    const float* query;
    int64_t query_token_stride, query_head_stride;
    Part keys, values;
    int64_t pool_blocks;
    const int32_t *query_starts, *seq_lens, *tables;
    int64_t table_stride, table_entries, sequences, query_tokens, heads, kv_heads, head_dim, value_dim, block_size;
    float scale, softcap;
    int64_t window;
    const float* sinks;
};

// What is wrong with the values in the tensors: 0 or a status of library.py. By one thread.
int64_t check_attention(const Attention& attention);
int64_t check_slots(const int64_t* slots, int64_t tokens, int64_t positions);

// A part of a step's attention; attention.cpp describes it.
struct AttentionItem {
    int sequence, kv_head, first_token, tokens;
    int64_t chunk;    // -1: all chunks
    int64_t partial;  // index of its first row among the partial results; -1: writes the output itself
};

// The items of a step, and space for their partial results. Layers with the same heads, lengths and window share it.
struct AttentionPlan {
    std::vector<AttentionItem> items, split;  // split: one (sequence, KV head) each, whose chunks are merged afterwards
    int64_t partial_rows = 0;
    std::unique_ptr<float[]> space;

    explicit AttentionPlan(const Attention& attention);
};

void attend(Team& team, const Attention& attention, const AttentionPlan& plan);

// One token's keys or values to its slot. By one thread.
void write_slot(const Part& part, const float* from, int64_t head_stride, int64_t slot, int64_t kv_heads, int64_t head_dim,
                int64_t block_size);

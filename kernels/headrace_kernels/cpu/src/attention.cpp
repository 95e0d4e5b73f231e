// Paged attention in float32, read straight from the cache's pool, and the store into it.
//
// A work item is (sequence, KV head, tile of query rows[, chunk of keys]); a row is one query token of one of the query
// heads that share the KV head. Keys are processed in tiles of 64 and chunks of 512, both at absolute positions: within a
// chunk the softmax is online, chunks are merged in order. Whether the chunks of a row are computed by one item or by
// several, alone or in a batch, as prefill or as decode, the same operations run in the same order: the bits are the same.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "entries.h"
#include "vector.h"

namespace {

constexpr int TILE = 64;     // keys per softmax step
constexpr int CHUNK = 512;   // keys per mergeable partial result
constexpr int MAX_ROWS = 64; // query rows per item: at least one token with all query heads of a KV head
constexpr int64_t MAX_SIZE = 1 << 16;  // of a head and of a block, and of the number of KV heads: indices fit an int
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

// What an entry returns: library.py raises the errors.
enum Status : int64_t { DONE, UNSUPPORTED, BAD_LENGTHS, BAD_TABLE, BAD_SLOT };

// Rows of a block of a product, and vectors of one: some 12 sums of the 16 registers, of AVX-512 16 of 32.
#ifdef __AVX512F__
constexpr int ROW_BLOCK = 8;
constexpr int vectors_of(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr int ROW_BLOCK = 6;
constexpr int vectors_of(int rows) { return rows == 1 ? 4 : rows <= 2 ? 2 : 1; }
#endif

struct Batch {
    float* out;
    const float *query;
    int64_t query_token_stride, query_head_stride;
    Part keys, values;
    const int32_t *query_starts, *seq_lens, *tables;
    int64_t table_stride;
    int heads, kv_heads, head_dim, value_dim, block_size;
    float scale, softcap;
    int64_t window;
    const float* sinks;

    int group() const { return heads / kv_heads; }
    int64_t query_len(int s) const { return query_starts[s + 1] - query_starts[s]; }
    int64_t first_position(int s) const { return seq_lens[s] - query_len(s); }
    int64_t oldest_seen(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
    const float* read(const Part& part, int s, int kv_head, int64_t position) const {
        return part.at(tables[s * table_stride + position / block_size], kv_head, position % block_size);
    }
};

typedef AttentionItem Item;

// Softmax state of a tile of rows.
struct Rows {
    float *peak, *total, *mixed;  // [rows], [rows], [rows, value_dim]
};

// What one thread computes in; uninitialised, since it is made for each layer and step.
struct Scratch {
    const std::unique_ptr<float[]> space, zeros;
    float *query, *mixed, *chunk_mixed, *transposed, *scores;
    float peak[MAX_ROWS], total[MAX_ROWS], chunk_peak[MAX_ROWS], chunk_total[MAX_ROWS];
    explicit Scratch(int head_dim)
        : space(new float[(3 * MAX_ROWS + TILE) * head_dim + MAX_ROWS * TILE]), zeros(new float[head_dim]()), query(space.get()),
          mixed(query + MAX_ROWS * head_dim), chunk_mixed(mixed + MAX_ROWS * head_dim),
          transposed(chunk_mixed + MAX_ROWS * head_dim), scores(transposed + TILE * head_dim) {}
};

// c[ROWS][VECTORS * 16] += a[ROWS][depth] * b[depth][...], b given by a function from depth index to row pointer.
template <int ROWS, int VECTORS, class RowOf>
inline void multiply_block(const float* a, int a_stride, RowOf b, int from, int to, float* c, int c_stride) {
    float_register acc[ROWS][VECTORS * PIECES];  // compilers keep these in registers, and arrays of `floats` not always
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) split(load(c + r * c_stride + v * WIDTH), acc[r] + v * PIECES);
    for (int k = from; k < to; k++) {
        const float* row = b(k);
        float_register y[VECTORS * PIECES];
        for (int v = 0; v < VECTORS; v++) split(load(row + v * WIDTH), y + v * PIECES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const float_register x = a[r * a_stride + k] - float_register{};
            for (int v = 0; v < VECTORS * PIECES; v++) acc[r][v] = multiply_add(x, y[v], acc[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(c + r * c_stride + v * WIDTH, read<floats>(acc[r] + v * PIECES));
}

template <int ROWS, class RowOf>
inline void multiply_rows(const float* a, int a_stride, RowOf b, int from, int to, float* c, int c_stride, int width) {
    constexpr int VECTORS = vectors_of(ROWS);
    int column = 0;
    for (; column + VECTORS * WIDTH <= width; column += VECTORS * WIDTH)
        multiply_block<ROWS, VECTORS>(a, a_stride, [=](int k) { return b(k) + column; }, from, to, c + column, c_stride);
    for (; column < width; column += WIDTH)
        multiply_block<ROWS, 1>(a, a_stride, [=](int k) { return b(k) + column; }, from, to, c + column, c_stride);
}

template <class RowOf>
void multiply(const float* a, int a_stride, int rows, RowOf b, int from, int to, float* c, int c_stride, int width) {
    int r = 0;
    for (; r + ROW_BLOCK <= rows; r += ROW_BLOCK)
        multiply_rows<ROW_BLOCK>(a + r * a_stride, a_stride, b, from, to, c + r * c_stride, c_stride, width);
    a += r * a_stride;
    c += r * c_stride;
    switch (rows - r) {
        case 7: return multiply_rows<7>(a, a_stride, b, from, to, c, c_stride, width);
        case 6: return multiply_rows<6>(a, a_stride, b, from, to, c, c_stride, width);
        case 5: return multiply_rows<5>(a, a_stride, b, from, to, c, c_stride, width);
        case 4: return multiply_rows<4>(a, a_stride, b, from, to, c, c_stride, width);
        case 3: return multiply_rows<3>(a, a_stride, b, from, to, c, c_stride, width);
        case 2: return multiply_rows<2>(a, a_stride, b, from, to, c, c_stride, width);
        case 1: return multiply_rows<1>(a, a_stride, b, from, to, c, c_stride, width);
    }
}

// A step of a transposition: swaps halves of each 2 * STEP lanes of x[i] with those of x[i + STEP].
template <int STEP> inline void swap_lanes(float_register* x) {
    int_register low, high;
    for (int i = 0; i < LANES; i++) {
        low[i] = (i & STEP) ? (i - STEP) + LANES : i;
        high[i] = (i & STEP) ? i + LANES : i + STEP;
    }
    for (int i = 0; i < LANES; i++) {
        if (i & STEP) continue;
        const float_register a = x[i], b = x[i + STEP];
        x[i] = shuffled(a, b, low);
        x[i + STEP] = shuffled(a, b, high);
    }
    if constexpr (STEP > 1) swap_lanes<STEP / 2>(x);
}

// transposed[d][TILE] = keys[n][d]: the scores then run over keys in vector lanes.
void transpose(const float* const* keys, int count, int head_dim, float* transposed) {
    for (int n = 0; n < count; n += LANES)
        for (int d = 0; d < head_dim; d += LANES) {
            float_register x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = read<float_register>(keys[n + i] + d);
            swap_lanes<LANES / 2>(x);
            for (int i = 0; i < LANES; i++) Memory<float_register>::write((char*)(transposed + (d + i) * TILE + n), x[i]);
        }
}

// One tile of keys [base, base + TILE) for a tile of rows: online softmax into `rows`.
void attend_tile(const Batch& batch, const Item& item, int64_t base, Scratch& scratch, Rows rows) {
    const int group = batch.group(), head_dim = batch.head_dim, value_dim = batch.value_dim, count = item.tokens * group;
    const int64_t first = batch.first_position(item.sequence) + item.first_token;
    const int64_t oldest = batch.oldest_seen(first);
    const int from = (int)std::max<int64_t>(0, oldest - base);
    const int to = (int)std::min<int64_t>(TILE, first + item.tokens - base);
    const int end = (to + WIDTH - 1) / WIDTH * WIDTH;

    const float *key_rows[TILE], *value_rows[TILE];
    for (int n = 0; n < end; n++) {
        bool valid = n >= from && n < to;  // an invalid key may be in freed memory
        key_rows[n] = valid ? batch.read(batch.keys, item.sequence, item.kv_head, base + n) : scratch.zeros.get();
        value_rows[n] = valid ? batch.read(batch.values, item.sequence, item.kv_head, base + n) : scratch.zeros.get();
    }
    float *transposed = scratch.transposed, *scores = scratch.scores;
    transpose(key_rows, end, head_dim, transposed);
    std::fill(scores, scores + count * TILE, 0.f);
    multiply(scratch.query, head_dim, count, [=](int k) { return transposed + k * TILE; }, 0, head_dim, scores, TILE, end);

    const ints lane = lanes();
    for (int r = 0; r < count; r++) {
        float* row = scores + r * TILE;
        const int64_t position = first + r / group;
        const int low = (int)std::max<int64_t>(0, batch.oldest_seen(position) - base);
        const int high = (int)std::min<int64_t>(to, position + 1 - base);
        if (low >= high) {
            std::fill(row, row + end, 0.f);
            continue;
        }
        floats peak = spread(NEGATIVE_INFINITY);
        for (int n = 0; n < end; n += WIDTH) {
            floats x = load(row + n) * batch.scale;
            if (batch.softcap != 0.f) x = batch.softcap * hyperbolic_tangent(x / batch.softcap);
            x = pick((lane + n >= low) & (lane + n < high), x, spread(NEGATIVE_INFINITY));
            store(row + n, x);
            peak = pick(x > peak, x, peak);
        }
        const float highest = std::max(rows.peak[r], largest(peak));
        floats total{};
        for (int n = 0; n < end; n += WIDTH) {
            floats e = exponential(load(row + n) - highest);
            e = pick((lane + n >= low) & (lane + n < high), e, floats{});
            store(row + n, e);
            total += e;
        }
        // 0 for the first tile of a row.
        const float shrink = rows.peak[r] == highest ? 1.f : std::exp(rows.peak[r] - highest);
        rows.peak[r] = highest;
        rows.total[r] = rows.total[r] * shrink + sum(total);
        if (shrink != 1.f) {
            float* mixed = rows.mixed + r * value_dim;
            for (int d = 0; d < value_dim; d += WIDTH) store(mixed + d, load(mixed + d) * shrink);
        }
    }
    const float* const* value_of = value_rows;
    multiply(scores, TILE, count, [=](int k) { return value_of[k]; }, from, to, rows.mixed, value_dim, value_dim);
}

void attend_chunk(const Batch& batch, const Item& item, int64_t chunk, Scratch& scratch, Rows rows) {
    const int count = item.tokens * batch.group();
    std::fill(rows.peak, rows.peak + count, NEGATIVE_INFINITY);
    std::fill(rows.total, rows.total + count, 0.f);
    std::fill(rows.mixed, rows.mixed + count * batch.value_dim, 0.f);
    const int64_t first = batch.first_position(item.sequence) + item.first_token;
    const int64_t oldest = batch.oldest_seen(first), end = std::min((chunk + 1) * CHUNK, first + item.tokens);
    for (int64_t base = chunk * CHUNK; base < end; base += TILE)
        if (base + TILE > oldest) attend_tile(batch, item, base, scratch, rows);
}

// Folds row `from` of one chunk into row `into`, which holds the chunks before it.
void merge_row(float& into_peak, float& into_total, float* into, float peak, float total, const float* from, int value_dim) {
    if (total == 0.f) return;  // the row attends to no key of this chunk
    const float highest = std::max(into_peak, peak);
    const float keep = std::exp(into_peak - highest), take = std::exp(peak - highest);
    into_peak = highest;
    into_total = into_total * keep + total * take;
    for (int d = 0; d < value_dim; d += WIDTH) store(into + d, load(into + d) * keep + load(from + d) * take);
}

void finish_row(const Batch& batch, int64_t token, int head, float peak, float total, const float* mixed) {
    float keep = 1.f;
    if (batch.sinks) {
        const float highest = std::max(peak, batch.sinks[head]);
        keep = std::exp(peak - highest);
        total = total * keep + std::exp(batch.sinks[head] - highest);
    }
    const float factor = keep / total;
    float* out = batch.out + (token * batch.heads + head) * batch.value_dim;
    for (int d = 0; d < batch.value_dim; d += WIDTH) store(out + d, load(mixed + d) * factor);
}

void load_query(const Batch& batch, const Item& item, Scratch& scratch) {
    const int group = batch.group();
    float* to = scratch.query;
    for (int t = 0; t < item.tokens; t++)
        for (int g = 0; g < group; g++, to += batch.head_dim) {
            const int64_t token = batch.query_starts[item.sequence] + item.first_token + t;
            const float* from = batch.query + token * batch.query_token_stride +
                                (item.kv_head * group + g) * batch.query_head_stride;
            std::copy(from, from + batch.head_dim, to);
        }
}

void run_whole(const Batch& batch, const Item& item, Scratch& scratch) {
    const int group = batch.group(), value_dim = batch.value_dim, count = item.tokens * group;
    const int64_t first = batch.first_position(item.sequence) + item.first_token;
    const int64_t first_chunk = batch.oldest_seen(first) / CHUNK, last_chunk = (first + item.tokens - 1) / CHUNK;
    Rows all{scratch.peak, scratch.total, scratch.mixed};
    Rows part{scratch.chunk_peak, scratch.chunk_total, scratch.chunk_mixed};
    attend_chunk(batch, item, first_chunk, scratch, all);
    for (int64_t chunk = first_chunk + 1; chunk <= last_chunk; chunk++) {
        attend_chunk(batch, item, chunk, scratch, part);
        for (int r = 0; r < count; r++)
            merge_row(all.peak[r], all.total[r], all.mixed + r * value_dim, part.peak[r], part.total[r],
                      part.mixed + r * value_dim, value_dim);
    }
    for (int r = 0; r < count; r++)
        finish_row(batch, batch.query_starts[item.sequence] + item.first_token + r / group,
                   item.kv_head * group + r % group, all.peak[r], all.total[r], all.mixed + r * value_dim);
}

// Zeros for the tokens of no sequence, and of those without keys.
void clear_others(const Batch& batch, int64_t sequences, int64_t tokens) {
    const int64_t row = (int64_t)batch.heads * batch.value_dim;
    int64_t done = 0;
    for (int64_t s = 0; s < sequences; s++) {
        if (batch.seq_lens[s] == 0) continue;
        std::fill(batch.out + done * row, batch.out + batch.query_starts[s] * row, 0.f);
        done = batch.query_starts[s + 1];
    }
    std::fill(batch.out + done * row, batch.out + tokens * row, 0.f);
}

Batch batch_of(const Attention& a) {
    return {a.out, a.query, a.query_token_stride, a.query_head_stride, a.keys, a.values, a.query_starts, a.seq_lens, a.tables,
            a.table_stride, (int)a.heads, (int)a.kv_heads, (int)a.head_dim, (int)a.value_dim, (int)a.block_size, a.scale,
            a.softcap, a.window, a.sinks};
}

}  // namespace

// Whether every token and every block that the sequences name is inside its tensor.
int64_t check_attention(const Attention& a) {
    if (a.kv_heads < 1 || a.heads < 1 || a.heads % a.kv_heads || a.heads / a.kv_heads > MAX_ROWS || a.head_dim < 1 ||
        a.head_dim % WIDTH || a.value_dim < 1 || a.value_dim % WIDTH || a.value_dim > a.head_dim || a.block_size < 1 ||
        a.window < 0 || std::max({a.kv_heads, a.head_dim, a.block_size}) > MAX_SIZE)
        return UNSUPPORTED;
    const Batch batch = batch_of(a);
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t start = batch.query_starts[s], stop = batch.query_starts[s + 1], length = batch.seq_lens[s];
        if (start < 0 || stop < start || stop > a.query_tokens || length < 0) return BAD_LENGTHS;
        if (start == stop || length == 0) continue;
        if (length < stop - start) return BAD_LENGTHS;
        const int64_t last = (length - 1) / batch.block_size;
        if (last >= a.table_entries) return BAD_TABLE;
        for (int64_t i = batch.oldest_seen(length - (stop - start)) / batch.block_size; i <= last; i++) {
            const int64_t block = batch.tables[s * batch.table_stride + i];
            if (block < 0 || block >= a.pool_blocks) return BAD_TABLE;
        }
    }
    return DONE;
}

int64_t check_slots(const int64_t* slots, int64_t tokens, int64_t positions) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] >= positions) return BAD_SLOT;
    return DONE;
}

AttentionPlan::AttentionPlan(const Attention& a) {
    const Batch batch = batch_of(a);
    const int group = batch.group(), tile_tokens = MAX_ROWS / group;
    for (int s = 0; s < a.sequences; s++) {
        const int tokens = batch.seq_lens[s] ? (int)batch.query_len(s) : 0;
        const int64_t first_chunk = batch.oldest_seen(batch.first_position(s)) / CHUNK;
        const int64_t chunks = (batch.seq_lens[s] - 1) / CHUNK - first_chunk + 1;
        for (int kv_head = 0; kv_head < a.kv_heads && tokens > 0; kv_head++) {
            if (tokens <= tile_tokens && chunks > 1) {
                split.push_back({s, kv_head, 0, tokens, chunks, partial_rows});
                for (int64_t c = 0; c < chunks; c++, partial_rows += tokens * group)
                    items.push_back({s, kv_head, 0, tokens, first_chunk + c, partial_rows});
            } else {
                for (int end = tokens; end > 0; end -= tile_tokens) {  // the longest first
                    int start = std::max(0, end - tile_tokens);
                    items.push_back({s, kv_head, start, end - start, -1, -1});
                }
            }
        }
    }
    space.reset(new float[partial_rows * (a.value_dim + 2)]);
}

void attend(Team& team, const Attention& a, const AttentionPlan& plan) {
    const Batch batch = batch_of(a);
    const int64_t value_dim = a.value_dim;
    float *peaks = plan.space.get(), *totals = peaks + plan.partial_rows, *mixed = totals + plan.partial_rows;
    if (team.rank == 0) clear_others(batch, a.sequences, a.query_tokens);
    Scratch scratch((int)a.head_dim);
    team.take((int64_t)plan.items.size(), [&](int64_t i) {
        const Item& item = plan.items[i];
        load_query(batch, item, scratch);
        if (item.chunk < 0)
            run_whole(batch, item, scratch);
        else
            attend_chunk(batch, item, item.chunk, scratch,
                         {peaks + item.partial, totals + item.partial, mixed + item.partial * value_dim});
    });
    if (plan.split.empty()) return;
    team.take((int64_t)plan.split.size(), [&](int64_t i) {
        const Item& item = plan.split[i];
        const int group = batch.group(), rows = item.tokens * group;
        for (int r = 0; r < rows; r++) {
            const int64_t into = item.partial + r;
            for (int64_t c = 1; c < item.chunk; c++) {
                const int64_t from = into + c * rows;
                merge_row(peaks[into], totals[into], mixed + into * value_dim, peaks[from], totals[from],
                          mixed + from * value_dim, (int)value_dim);
            }
            finish_row(batch, batch.query_starts[item.sequence] + r / group, item.kv_head * group + r % group, peaks[into],
                       totals[into], mixed + into * value_dim);
        }
    });
}

namespace {

constexpr int SELECTED_AT_ONCE = 64;  // tokens whose scores are in memory

// Scores of the keys [base, base + TILE), or up to `keys`, for one token: over heads, sums of weight * max(0, query . key).
void score_tile(const Batch& batch, int s, const float* query, const float* weights, int64_t base, int64_t keys,
                Scratch& scratch, float* out) {
    const int to = (int)std::min<int64_t>(TILE, keys - base), end = (to + WIDTH - 1) / WIDTH * WIDTH;
    const float* rows[TILE];
    for (int n = 0; n < end; n++) rows[n] = n < to ? batch.read(batch.keys, s, 0, base + n) : scratch.zeros.get();
    float *transposed = scratch.transposed, *scores = scratch.scores;
    transpose(rows, end, batch.head_dim, transposed);
    std::fill(scores, scores + batch.heads * TILE, 0.f);
    multiply(query, batch.head_dim, batch.heads, [=](int k) { return transposed + k * TILE; }, 0, batch.head_dim, scores, TILE,
             end);
    for (int n = 0; n < end; n += WIDTH) {
        floats total{};
        for (int h = 0; h < batch.heads; h++) {
            const floats x = load(scores + h * TILE + n);
            total += weights[h] * pick(x > 0.f, x, floats{});
        }
        store(out + n, total);
    }
}

// The positions of the `count` highest of `scores`, in order; of equal ones the first.
void choose(const float* scores, int64_t keys, int64_t count, std::vector<int32_t>& positions) {
    positions.resize(keys);
    for (int64_t i = 0; i < keys; i++) positions[i] = (int32_t)i;
    std::nth_element(positions.begin(), positions.begin() + count, positions.end(), [=](int32_t a, int32_t b) {
        return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    positions.resize(count);
    std::sort(positions.begin(), positions.end());
}

}  // namespace

// Of each token: places [tokens, count] of keys, block * block_size + offset, and their number.
extern "C" int64_t headrace_select_keys(int32_t* places, int32_t* numbers, const float* query, const float* weights,
                                        int64_t count, int64_t pool_blocks, const Part* keys, const int32_t* query_starts,
                                        const int32_t* seq_lens, const int32_t* tables, int64_t table_stride,
                                        int64_t table_entries, int64_t sequences, int64_t tokens, int64_t heads,
                                        int64_t head_dim, int64_t block_size, int64_t threads) {
    const Attention a{nullptr, query, heads * head_dim, head_dim, *keys, *keys, pool_blocks, query_starts, seq_lens,
                      tables, table_stride, table_entries, sequences, tokens, heads, 1, head_dim, head_dim,
                      block_size, 1.f, 0.f, 0, nullptr};
    if (const int64_t status = check_attention(a)) return status;
    const Batch batch = batch_of(a);
    struct Token {
        int sequence;
        int64_t token, keys;
    };
    std::vector<Token> all;
    int64_t work = 0, longest = 0;
    for (int s = 0; s < sequences; s++)
        for (int64_t i = 0; seq_lens[s] && i < batch.query_len(s); i++) {
            all.push_back({s, query_starts[s] + i, batch.first_position(s) + i + 1});
            longest = std::max(longest, all.back().keys);
            work += all.back().keys * heads * head_dim;
        }
    const int64_t chunks = (longest + CHUNK - 1) / CHUNK, width = chunks * CHUNK;
    const std::unique_ptr<float[]> scores(new float[std::min<int64_t>(SELECTED_AT_ONCE, all.size()) * width]);
    run_team(threads_for(work, 1 << 18, (int)threads), [&](Team& team) {
        Scratch scratch((int)head_dim);
        std::vector<int32_t> positions;
        for (size_t first = 0; first < all.size(); first += SELECTED_AT_ONCE) {
            const int64_t rows = std::min<int64_t>(SELECTED_AT_ONCE, all.size() - first);
            team.take(rows * chunks, [&](int64_t i) {
                const Token& of = all[first + i / chunks];
                const int64_t from = i % chunks * CHUNK, to = std::min(of.keys, from + CHUNK);
                if (of.keys <= count) return;
                for (int64_t base = from; base < to; base += TILE)
                    score_tile(batch, of.sequence, query + of.token * heads * head_dim, weights + of.token * heads, base,
                               of.keys, scratch, scores.get() + i / chunks * width + base);
            });
            team.take(rows, [&](int64_t row) {
                const Token& of = all[first + row];
                const int64_t number = std::min(of.keys, count);
                if (of.keys > count) choose(scores.get() + row * width, of.keys, count, positions);
                const int32_t* table = tables + of.sequence * table_stride;
                for (int64_t i = 0; i < number; i++) {
                    const int64_t position = of.keys > count ? positions[i] : i;
                    places[of.token * count + i] =
                        (int32_t)(table[position / block_size] * block_size + position % block_size);
                }
                numbers[of.token] = (int32_t)number;
            });
        }
    });
    return DONE;
}

void write_slot(const Part& part, const float* from, int64_t head_stride, int64_t slot, int64_t kv_heads, int64_t head_dim,
                int64_t block_size) {
    for (int64_t h = 0; h < kv_heads; h++)
        std::memcpy(part.at(slot / block_size, h, slot % block_size), from + h * head_stride, head_dim * sizeof(float));
}

// `query_tokens`: rows of query and out; tables [sequences, table_entries].
extern "C" int64_t headrace_attention(float* out, const float* query, int64_t query_token_stride,
                                      int64_t query_head_stride, const Part* keys, const Part* values, int64_t pool_blocks,
                                      const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables,
                                      int64_t table_stride, int64_t table_entries, int64_t sequences,
                                      int64_t query_tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                      int64_t value_dim, int64_t block_size, float scale, int64_t window, float softcap,
                                      const float* sinks, int64_t threads) {
    const Attention a{out, query, query_token_stride, query_head_stride, *keys, *values, pool_blocks, query_starts, seq_lens,
                      tables, table_stride, table_entries, sequences, query_tokens, heads, kv_heads, head_dim, value_dim,
                      block_size, scale, softcap, window, sinks};
    if (const int64_t status = check_attention(a)) return status;
    int64_t work = 0;
    const Batch batch = batch_of(a);
    for (int s = 0; s < sequences; s++)
        work += batch.query_len(s) * heads * (seq_lens[s] - batch.oldest_seen(batch.first_position(s))) * head_dim;
    const AttentionPlan plan(a);
    run_team(threads_for(work, 1 << 18, (int)threads), [&](Team& team) { attend(team, a, plan); });
    return DONE;
}

extern "C" int64_t headrace_write_kv(const float* key, int64_t key_token_stride, int64_t key_head_stride,
                                     const float* value, int64_t value_token_stride, int64_t value_head_stride,
                                     const Part* keys, const Part* values, int64_t pool_blocks, const int64_t* slots,
                                     int64_t tokens, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                                     int64_t threads) {
    if (const int64_t status = check_slots(slots, tokens, pool_blocks * block_size)) return status;
    run_team(threads_for(tokens * kv_heads * head_dim, 1 << 18, (int)threads), [&](Team& team) {
        team.share(tokens, [&](int64_t t, int64_t to) {
            for (; t < to; t++) {
                if (slots[t] < 0) continue;
                write_slot(*keys, key + t * key_token_stride, key_head_stride, slots[t], kv_heads, head_dim, block_size);
                write_slot(*values, value + t * value_token_stride, value_head_stride, slots[t], kv_heads, head_dim,
                           block_size);
            }
        });
    });
    return DONE;
}

// log(sum(exp(row))) of rows of logits in float32, in pieces of fixed size that are merged in order, so that the bits depend on
// the row alone.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "team.h"
#include "vector.h"

namespace {

constexpr int64_t PIECE = 8192;

struct Part {
    float peak, total;
};

Part part_of(const float* x, int64_t n) {
    constexpr float low = -std::numeric_limits<float>::infinity();
    floats peaks = spread(low);
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        floats y = load(x + i);
        peaks = pick(y > peaks, y, peaks);
    }
    floats rest = spread(low);
    std::memcpy(&rest, x + i, (n - i) * sizeof(float));
    const int tail = (int)(n - i);
    peaks = pick(rest > peaks, rest, peaks);
    const float peak = largest(peaks);
    if (peak == low) {  // only -inf, or NaN, for which all comparisons are false
        float total = 0.f;
        for (i = 0; i < n; i++) total += x[i] != x[i] ? x[i] : 0.f;
        return {low, total};
    }
    floats totals{};
    for (i = 0; i + WIDTH <= n; i += WIDTH) totals += exponential(load(x + i) - peak);
    totals += pick(lanes() < tail, exponential(rest - peak), floats{});
    return {peak, sum(totals)};
}

}  // namespace

extern "C" void headrace_row_logsumexp(float* out, const float* scores, int64_t stride, int64_t rows, int64_t n,
                                       int64_t threads) {
    const int64_t pieces = (n + PIECE - 1) / PIECE;
    std::vector<Part> parts(rows * pieces);
    run_team(threads_for(rows * n, 1 << 17, (int)threads), [&](Team& team) {
        team.share(rows * pieces, [&](int64_t i, int64_t to) {
            for (; i < to; i++) {
                const int64_t first = i % pieces * PIECE;
                parts[i] = part_of(scores + i / pieces * stride + first, std::min(PIECE, n - first));
            }
        });
    });
    for (int64_t r = 0; r < rows; r++) {
        const Part* part = &parts[r * pieces];
        float peak = part[0].peak, total = 0.f;
        for (int64_t p = 1; p < pieces; p++) peak = std::max(peak, part[p].peak);
        for (int64_t p = 0; p < pieces; p++)
            total += part[p].total * (part[p].peak == peak ? 1.f : std::exp(part[p].peak - peak));
        out[r] = peak + std::log(total);
    }
}

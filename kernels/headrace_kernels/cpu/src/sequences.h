// The pieces of sequences that a step computes in layers with recurrent state. `recurrent.py` and `scans.py` pass them.
#pragma once
#include <algorithm>
#include <cstdint>

struct Sequences {
    const int32_t *starts, *reads, *writes;  // the tokens of piece s are starts[s] to starts[s + 1]
    int64_t count;

    // 0 or a status of library.py.
    int64_t check(int64_t tokens, int64_t slots) const {
        if (starts[0] < 0 || starts[count] > tokens) return 2;
        for (int64_t s = 0; s < count; s++) {
            if (starts[s] > starts[s + 1]) return 2;
            if (reads[s] < 0 || reads[s] >= slots || writes[s] < 0 || writes[s] >= slots) return 4;
        }
        return 0;
    }

    // The rows of tokens of no sequence. By one thread.
    template <class T> void clear_others(T* out, int64_t tokens, int64_t size) const {
        std::fill(out, out + starts[0] * size, T{});
        std::fill(out + starts[count] * size, out + tokens * size, T{});
    }

    bool empty(int64_t s) const { return starts[s] == starts[s + 1]; }

    // Whether a piece continues the sequence of the one before it, whose state it reads.
    bool continues(int64_t s) const { return s && reads[s] && reads[s] == writes[s - 1]; }

    // The end of the pieces of a sequence whose first one is s.
    int64_t end(int64_t s) const {
        do s++;
        while (s < count && continues(s));
        return s;
    }
};

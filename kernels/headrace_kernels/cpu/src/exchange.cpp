// Sums and gathers between processes of one machine, through memory that all of them map.
//
// Layout of a segment, in lines of 64 bytes:
//   line 0        id (read by others)
//   line 1        abort: not zero = all waits end
//   line 2 + r    rank r: number of chunks it has written, and number of ranks that wait for it
//   from the next page on, slots [2][size][slot_bytes]: chunk n of rank r is in slot [n % 2][r].
//
// A chunk takes one synchronization: when all ranks are at chunk n + 1, all have read chunk n, so that two sets of slots
// are sufficient. Every rank adds all slots in rank order, and so all get the same bits.

#include <cstdint>
#include <cstring>
#include <ctime>

#include "team.h"

namespace {

constexpr int64_t kLine = 64, kPage = 4096;
constexpr int kPauses = 400, kYields = 200;     // about 10 us, then some tens: a peer is rarely later
constexpr timespec kSleep = {0, 10'000'000};    // a sleep ends by a wake-up, and aborts are checked at least this often
constexpr int64_t kAborted = -1;

struct Line {
  uint32_t arrived;
  uint32_t waiters;
  char rest[kLine - 8];
};

struct Segment {
  char* base;
  int64_t rank, size, slot_bytes;

  uint32_t aborted() const { return __atomic_load_n(reinterpret_cast<uint32_t*>(base + kLine), __ATOMIC_RELAXED); }
  Line& line(int64_t r) const { return *reinterpret_cast<Line*>(base + (2 + r) * kLine); }
  char* slot(uint32_t chunk, int64_t r) const {
    const int64_t head = (kLine * (2 + size) + kPage - 1) / kPage * kPage;
    return base + head + ((chunk & 1) * size + r) * slot_bytes;
  }
};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void arrive(const Segment& segment, uint32_t chunk) {
  Line& own = segment.line(segment.rank);
  __atomic_store_n(&own.arrived, chunk, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&own.waiters, __ATOMIC_SEQ_CST)) wake(&own.arrived, true);
}

// 0 once rank r has written `chunk`; 1 + r when it has not in time.
int64_t await(const Segment& segment, int64_t r, uint32_t chunk, int64_t timeout_ns) {
  Line& line = segment.line(r);
  const auto arrived = [&] {
    return static_cast<int32_t>(__atomic_load_n(&line.arrived, __ATOMIC_ACQUIRE) - chunk) >= 0;
  };
  for (int i = 0; i < kPauses; ++i) {
    if (arrived()) return 0;
    pause_briefly();
  }
  for (int i = 0; i < kYields; ++i) {
    if (arrived()) return 0;
    sched_yield();
  }
  const int64_t deadline = now_ns() + timeout_ns;
  int64_t status = 0;
  __atomic_fetch_add(&line.waiters, 1, __ATOMIC_SEQ_CST);
  while (true) {
    const uint32_t seen = __atomic_load_n(&line.arrived, __ATOMIC_SEQ_CST);
    if (static_cast<int32_t>(seen - chunk) >= 0) break;
    if (segment.aborted()) {
      status = kAborted;
      break;
    }
    if (now_ns() > deadline) {
      status = 1 + r;
      break;
    }
    sleep_on(&line.arrived, seen, &kSleep, true);
  }
  __atomic_fetch_sub(&line.waiters, 1, __ATOMIC_SEQ_CST);
  return status;
}

int64_t synchronize(const Segment& segment, uint32_t chunk, int64_t timeout_ns) {
  if (segment.aborted()) return kAborted;
  arrive(segment, chunk);
  for (int64_t r = 0; r < segment.size; ++r) {
    if (r == segment.rank) continue;
    if (const int64_t status = await(segment, r, chunk, timeout_ns)) return status;
  }
  return 0;
}

// out = slot 0 + slot 1 + ... in this order, in pieces that stay in the first-level cache.
void add_in_order(const Segment& segment, uint32_t chunk, float* out, int64_t count) {
  constexpr int64_t kPiece = 2048;
  for (int64_t start = 0; start < count; start += kPiece) {
    const int64_t n = count - start < kPiece ? count - start : kPiece;
    float* __restrict to = out + start;
    const float* first = reinterpret_cast<const float*>(segment.slot(chunk, 0)) + start;
    const float* second = reinterpret_cast<const float*>(segment.slot(chunk, 1)) + start;
    for (int64_t i = 0; i < n; ++i) to[i] = first[i] + second[i];
    for (int64_t r = 2; r < segment.size; ++r) {
      const float* next = reinterpret_cast<const float*>(segment.slot(chunk, r)) + start;
      for (int64_t i = 0; i < n; ++i) to[i] += next[i];
    }
  }
}

}  // namespace

// Sums `count` floats over the ranks, in place. `sequence`: chunks so far, of this rank. status: 0 done, -1 aborted,
// 1 + r: rank r did not join within timeout_ms.
extern "C" void headrace_exchange_sum(char* base, float* data, int64_t count, int64_t rank, int64_t size,
                                      int64_t slot_bytes, uint32_t* sequence, int64_t timeout_ms, int64_t* status) {
  const Segment segment{base, rank, size, slot_bytes};
  const int64_t most = slot_bytes / static_cast<int64_t>(sizeof(float));
  *status = 0;
  for (int64_t start = 0; start < count; start += most) {
    const int64_t n = count - start < most ? count - start : most;
    const uint32_t chunk = ++*sequence;
    std::memcpy(segment.slot(chunk, rank), data + start, n * sizeof(float));
    *status = synchronize(segment, chunk, timeout_ms * 1'000'000);
    if (*status) return;
    add_in_order(segment, chunk, data + start, n);
  }
}

// out [size, bytes]: the data of each rank.
extern "C" void headrace_exchange_gather(char* base, const char* data, char* out, int64_t bytes, int64_t rank,
                                         int64_t size, int64_t slot_bytes, uint32_t* sequence, int64_t timeout_ms,
                                         int64_t* status) {
  const Segment segment{base, rank, size, slot_bytes};
  *status = 0;
  for (int64_t start = 0; start < bytes; start += slot_bytes) {
    const int64_t n = bytes - start < slot_bytes ? bytes - start : slot_bytes;
    const uint32_t chunk = ++*sequence;
    std::memcpy(segment.slot(chunk, rank), data + start, n);
    *status = synchronize(segment, chunk, timeout_ms * 1'000'000);
    if (*status) return;
    for (int64_t r = 0; r < size; ++r) std::memcpy(out + r * bytes + start, segment.slot(chunk, r), n);
  }
}

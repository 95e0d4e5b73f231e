// The threads of one call, their shares of its work, and the barrier between two parts of it.
//
// The threads are those of torch's OpenMP runtime. Only the start and the end of a call are OpenMP's: its barriers sleep at
// once when it counts more threads than processors, as it does with a second team anywhere in the process.
#pragma once
#include <climits>
#include <cstdint>
#include <utility>

#include <omp.h>
#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleeps while *word is `seen`, until `wake` or for `limit`; may return early. `other_processes` may wake it, too.
static inline void sleep_on(uint32_t* word, uint32_t seen, const timespec* limit, bool other_processes) {
#if defined(__linux__)
    syscall(SYS_futex, word, other_processes ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, limit, nullptr, 0);
#else
    (void)word, (void)seen, (void)limit, (void)other_processes;
    sched_yield();
#endif
}

static inline void wake(uint32_t* word, bool other_processes) {
#if defined(__linux__)
    syscall(SYS_futex, word, other_processes ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word, (void)other_processes;
#endif
}

// One thread's view of its team. All threads of a team call the same functions of it, in the same order.
class Team {
  public:
    struct Shared {
        alignas(64) uint32_t arrived = 0;
        alignas(64) uint32_t phase = 0;
        uint32_t sleepers = 0;
        alignas(64) int64_t taken = 0;
    };

    Team(Shared& shared, int rank, int size) : size(size), rank(rank), shared(shared) {}

    const int size, rank;

    // Waits until all threads are here: some 30 to 100 us awake, by the CPU, then asleep.
    void wait() {
        if (size == 1) return;
        const uint32_t seen = __atomic_load_n(&shared.phase, __ATOMIC_RELAXED);
        if (__atomic_add_fetch(&shared.arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)size) {
            __atomic_store_n(&shared.arrived, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&shared.phase, seen + 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&shared.sleepers, __ATOMIC_SEQ_CST)) wake(&shared.phase, false);
            return;
        }
        for (int i = 0; i < PAUSES; i++) {
            if (__atomic_load_n(&shared.phase, __ATOMIC_ACQUIRE) != seen) return;
            pause_briefly();
        }
        __atomic_fetch_add(&shared.sleepers, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&shared.phase, __ATOMIC_SEQ_CST) == seen) sleep_on(&shared.phase, seen, nullptr, false);
        __atomic_fetch_sub(&shared.sleepers, 1, __ATOMIC_SEQ_CST);
    }

    // This thread's part of [0, count): from and to. The parts are equal and in order.
    std::pair<int64_t, int64_t> part(int64_t count) const { return {count * rank / size, count * (rank + 1) / size}; }

    // work(from, to): this thread's part of [0, count). Then waits.
    template <class Work> void share(int64_t count, Work work) {
        const auto [from, to] = part(count);
        if (from < to) work(from, to);
        wait();
    }

    // work(i) for each i of [0, count), by whichever thread is free. Then waits.
    template <class Work> void take(int64_t count, Work work) {
        // The counter is never reset: with the last, failed attempt of each thread, a call adds count + size to it.
        int64_t i;
        while ((i = __atomic_fetch_add(&shared.taken, 1, __ATOMIC_RELAXED) - base) < count) work(i);
        base += count + size;
        wait();
    }

  private:
    static constexpr int PAUSES = 2000;
    Shared& shared;
    int64_t base = 0;
};

// work(team) on `size` threads.
template <class Work> inline void run_team(int size, Work work) {
    Team::Shared shared;
    if (size <= 1) {
        Team alone(shared, 0, 1);
        return work(alone);
    }
#pragma omp parallel num_threads(size)
    {
        Team team(shared, omp_get_thread_num(), omp_get_num_threads());  // a limit of the process may leave fewer
        work(team);
    }
}

// Number of threads for a piece of work: below `grain` units each, waking a thread takes longer than it saves.
static inline int threads_for(int64_t work, int64_t grain, int threads) {
    int64_t useful = work / grain;
    return useful < 1 ? 1 : useful < threads ? (int)useful : threads;
}

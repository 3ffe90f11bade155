#include "pool.h"

#include <algorithm>
#include <chrono>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace specpress {

namespace {

// Long enough to bridge what Python does between two forwards, short enough to cost nothing in an idle program.
constexpr std::chrono::microseconds PATIENCE(1000);
// Spins within a forward, some 10 microseconds. Who waits longer lets others have the core: a server's other process
// waited a millisecond for it to send a token on.
constexpr int BRIEF = 512;

// The parts of Pool::state_: workers inside, open to more, number of the call.
constexpr uint64_t INSIDE = 0xffff, OPEN = 0x10000, TURN = 0x20000;

std::atomic<int> forks{0};

void count_forks() {
#if defined(__unix__) || defined(__APPLE__)
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
#endif
}

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads), born_(forks.load()), shares_(static_cast<size_t>(threads_)) {
    count_forks();
    for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    if (forked()) {
        for (auto& worker : workers_) worker.detach();  // they exist in the parent only
        return;
    }
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stop_ = true;
        state_.fetch_add(TURN);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

bool Pool::forked() const { return forks.load(std::memory_order_relaxed) != born_; }

void Pool::take(int thread) {
    for (int turn = 0; turn < threads_; turn++) {
        Share& share = shares_[static_cast<size_t>((thread + turn) % threads_)];
        for (;;) {
            int64_t begin = share.next.load(std::memory_order_relaxed), end = begin;
            do {
                const int64_t left = share.end - begin;
                if (left <= 0) break;
                end = begin + std::min(left, std::max(cut_.least, std::min(cut_.most, left / 4)));
            } while (!share.next.compare_exchange_weak(begin, end, std::memory_order_relaxed));
            if (begin >= share.end) break;
            call_(context_, thread, begin, end);
        }
    }
}

void Pool::share(int64_t count, Cut cut, Call call, void* context) {
    std::lock_guard<std::mutex> one(callers_);
    call_ = call, context_ = context, cut_ = cut;
    for (int i = 0; i < threads_; i++) {
        shares_[static_cast<size_t>(i)].next.store(count * i / threads_, std::memory_order_relaxed);
        shares_[static_cast<size_t>(i)].end = count * (i + 1) / threads_;
    }
    // Nobody is inside and the last call is closed, so this opens the next one.
    state_.fetch_add(TURN | OPEN);
    if (asleep_.load() > 0) {
        { std::lock_guard<std::mutex> lock(sleep_); }
        wake_.notify_all();
    }
    take(0);
    uint64_t state = state_.fetch_and(~OPEN, std::memory_order_acq_rel);
    for (int spins = 0; state & INSIDE; spins++) {
        pause();
        // The machine may have taken a worker off its core in the middle of a piece: let it have this one.
        if (spins > 4096) std::this_thread::yield();
        state = state_.load(std::memory_order_acquire);
    }
}

void Pool::work(int thread) {
    uint64_t seen = 0;
    for (;;) {
        const auto since = std::chrono::steady_clock::now();
        uint64_t state;
        for (int spins = 0; (state = state_.load(std::memory_order_acquire)) / TURN == seen; spins++) {
            pause();
            if (spins % 64 != 63) continue;
            if (spins > BRIEF) std::this_thread::yield();
            if (std::chrono::steady_clock::now() - since > PATIENCE) {
                std::unique_lock<std::mutex> lock(sleep_);
                asleep_.fetch_add(1);
                wake_.wait(lock, [&] { return state_.load() / TURN != seen; });
                asleep_.fetch_sub(1);
            }
        }
        if (stop_) return;
        while (state & OPEN) {
            if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
                take(thread);
                state_.fetch_sub(1, std::memory_order_release);
                break;
            }
        }
        // Who comes late to a call may read the turn of the pool's end instead, which is not to be waited for again.
        if (stop_) return;
        seen = state / TURN;
    }
}

}  // namespace specpress

// The pool: every item once, whoever takes it; sleeping, waking and ending at any moment.
#include "pool.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "check.h"

namespace kernels_test {

using specpress::Pool;

namespace {

void items_once(int threads, int64_t runs) {
    Pool pool(threads);
    Random random(static_cast<uint64_t>(threads));
    expect(pool.threads() == (threads < 1 ? 1 : threads), "a pool has the threads it was asked for");
    for (int64_t i = 0; i < runs; i++) {
        const int64_t count = random.whole(0, 40), least = random.whole(-1, 9);
        const specpress::Cut cut = {least, i % 2 ? least : random.whole(0, 40)};
        const int64_t largest = pool.threads() == 1 || count <= least ? count : std::max<int64_t>({1, cut.least, cut.most});
        std::vector<int> seen(static_cast<size_t>(count));
        std::vector<int64_t> by(static_cast<size_t>(pool.threads()));
        std::vector<int64_t> pieces(static_cast<size_t>(pool.threads()));
        pool.run(count, cut, [&](int thread, int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; item++) seen[item]++;
            pieces[thread] = std::max(pieces[thread], end - begin);
            by[thread] += end - begin;
        });
        int64_t taken = 0;
        for (int64_t own : by) taken += own;
        expect(taken == count, "the threads' shares add up");
        for (int64_t piece : pieces) expect(piece <= largest, "no piece is larger than asked for");
        for (int times : seen) expect(times == 1, "each item runs once");
        // Now and then longer than the workers' patience: they fall asleep and must be woken.
        if (i % 64 == 63) std::this_thread::sleep_for(std::chrono::microseconds(random.whole(100, 900)));
    }
}

// What one run wrote is what the next one reads, whichever threads take part.
void runs_in_order(int threads) {
    Pool pool(threads);
    std::vector<int64_t> values(64, 1);
    for (int round = 0; round < 200; round++) {
        std::vector<int64_t> next(64);
        pool.run(64, 1, [&](int, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) next[i] = (values[i] + values[(i + 1) % 64]) % 1000003;
        });
        values = next;
    }
    for (int64_t v : values) expect(v == values[0], "a run sees the one before it whole");
}

void callers_together() {
    Pool pool(3);
    std::vector<std::thread> callers;
    std::vector<int64_t> sums(3);
    for (int caller = 0; caller < 3; caller++)
        callers.emplace_back([&, caller] {
            for (int round = 0; round < 100; round++) {
                std::vector<int64_t> out(20);
                pool.run(20, 3, [&](int, int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; i++) out[i] = i;
                });
                for (int64_t v : out) sums[caller] += v;
            }
        });
    for (std::thread& caller : callers) caller.join();
    for (int64_t sum : sums) expect(sum == 19000, "callers wait for each other");
}

void ends_at_any_time() {
    for (int i = 0; i < 60; i++) {
        Pool pool(1 + i % 4);
        if (i % 3) pool.run(8, 1, [](int, int64_t, int64_t) {});
        // Awake, falling asleep or asleep.
        std::this_thread::sleep_for(std::chrono::microseconds(i % 5 * 120));
    }
}

void ends_right_after_a_call() {
    // A worker that is late for the call finds it over, and the pool's end in its place.
    for (int i = 0; i < 20000; i++) {
        Pool pool(2 + i % 4);
        pool.run(8, 1, [](int, int64_t, int64_t) {});
    }
}

}  // namespace

void test_pool() {
    for (int threads : {0, 1, 2, 3, 4}) items_once(threads, 1000);
    for (int threads : {2, 4}) runs_in_order(threads);
    callers_together();
    ends_at_any_time();
    ends_right_after_a_call();
}

void race() {
    int64_t unguarded = 0;
    Pool pool(2);
    for (int i = 0; i < 200; i++)
        pool.run(64, 1, [&](int, int64_t, int64_t) {
            unguarded++;
            std::this_thread::yield();
        });
    expect(unguarded >= 0, "a counter counts");
}

}  // namespace kernels_test

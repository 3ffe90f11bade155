// One set of threads for the kernels. The caller is one of them; the others spin briefly between calls, then sleep.
// Nobody waits for a thread that has not come: where other programs hold the cores, the caller does the work itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace specpress {

// How a call is cut: pieces of a quarter of what its thread has left, but at least and at most so many.
struct Cut {
    int64_t least, most;
};

class Pool {
   public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // f(thread, begin, end) over 0..count. Each thread walks its own share from front to back, so that what it reads is one
    // stream, and then helps with what others have left. What f computes must not depend on the cut. One caller at a time; in
    // a forked child the caller works alone.
    template <class F>
    void run(int64_t count, Cut cut, F&& f) {
        if (count <= 0) return;
        if (cut.least < 1) cut.least = 1;
        if (threads_ == 1 || count <= cut.least || forked()) {
            f(0, static_cast<int64_t>(0), count);
            return;
        }
        auto call = [](void* context, int thread, int64_t begin, int64_t end) { (*static_cast<F*>(context))(thread, begin, end); };
        share(count, cut, call, &f);
    }

    // The same in pieces of `piece`.
    template <class F>
    void run(int64_t count, int64_t piece, F&& f) {
        run(count, Cut{piece, piece}, std::forward<F>(f));
    }

   private:
    using Call = void (*)(void*, int, int64_t, int64_t);
    void share(int64_t count, Cut cut, Call call, void* context);
    void work(int thread);
    void take(int thread);
    bool forked() const;

    const int threads_;
    const int born_;
    std::vector<std::thread> workers_;
    std::mutex callers_;
    Call call_ = nullptr;
    void* context_ = nullptr;
    Cut cut_ = {1, 1};
    std::atomic<bool> stop_{false};  // also read by a worker that comes late to a call that is over
    // Per thread: where its share goes on, and where it ends.
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    std::vector<Share> shares_;
    // One word: how many workers are inside the call, whether it is open to more, and its number.
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
};

}  // namespace specpress

// Token counts of csrc/experts/sharded among threads of one process that stand for ranks, as a function of a library
// for tests: the text as it is, with segments that are really mapped once by each rank.
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "experts/sharded/counts.h"

extern "C" {

// Which of the mistakes that tests put into the code is switched on; 0: none.
int weave_mistake = 0;

// How many results of all ranks' calls are not the largest count, and how many calls failed. Ranks come at any time, and
// one that has its result dawdles as well.
int64_t run(int32_t world, int64_t num_calls, uint32_t seed, double timeout_s) {
    using namespace weave;
    using fabric::shm::Segment;
    constexpr int64_t kOffset = 128, kBytes = 4096;
    std::vector<std::unique_ptr<Segment>> owned;
    for (int32_t rank = 0; rank < world; ++rank)
        owned.emplace_back(Segment::create(kBytes, 77 + rank, 0));
    std::vector<int64_t> told(world * num_calls);
    std::mt19937 random(seed);
    for (int64_t& each : told)
        each = random() % 3 == 0 ? 0 : random() % 100000;
    std::atomic<int64_t> wrong{0};
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < world; ++rank) {
        threads.emplace_back([&, rank] {
            std::vector<std::unique_ptr<Segment>> mapped;
            std::vector<Segment*> segments;
            for (int32_t other = 0; other < world; ++other) {
                if (other != rank)
                    mapped.emplace_back(Segment::open(getpid(), owned[other]->fd(), 77 + other, kBytes));
                segments.push_back(other == rank ? owned[rank].get() : mapped.back().get());
            }
            fabric::shm::Group group(segments, rank, world, 0);
            moe::TokenCounts counts(group, kOffset, kBytes, 5, timeout_s);
            std::mt19937 own(seed + 1 + rank);
            for (int64_t at = 0; at < num_calls; ++at) {
                const int64_t* call = told.data() + at * world;
                int64_t want = 0, most = -1;
                for (int32_t other = 0; other < world; ++other)
                    want = call[other] > want ? call[other] : want;
                if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 50));
                if (!counts.largest(call[rank], most).ok()) {
                    ++wrong;
                    return;
                }
                wrong += most != want;
            }
        });
    }
    for (std::thread& each : threads)
        each.join();
    return wrong;
}
}

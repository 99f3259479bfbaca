// Sizes, counts and addresses that come from Python, checked where they come in: what does not fit is an error there,
// not a number that wrapped around, a division by zero or a wild store later. All throw std::invalid_argument.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

namespace weave {

// Sums of some sizes below it, and multiples by some thousand, still fit 64 bits.
constexpr int64_t kMostBytes = int64_t{1} << 50;
constexpr int64_t kMostCount = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostRanks = 1 << 16;
constexpr int32_t kMostThreads = 1 << 12;
// Elements of a row: its bytes still fit 32 bits.
constexpr int64_t kMostRow = int64_t{1} << 28;

inline int64_t within(const char* name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return value;
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ": expected " +
                                std::to_string(least) + " to " + std::to_string(most));
}

// The product of factors of which none is negative, at most kMostBytes.
inline int64_t product_of(const char* name, std::initializer_list<int64_t> factors) {
    int64_t product = 1;
    for (const int64_t factor : factors) {
        if (factor >= 0 && !__builtin_mul_overflow(product, factor, &product) && product <= kMostBytes) continue;
        std::string text;
        for (const int64_t each : factors)
            text += (text.empty() ? "" : " * ") + std::to_string(each);
        throw std::invalid_argument(std::string(name) + " is " + text + ": expected 0 to " +
                                    std::to_string(kMostBytes));
    }
    return product;
}

// [offset, offset + num_bytes) in an arena of `all` bytes.
inline void expect_inside(const char* name, int64_t offset, int64_t num_bytes, int64_t all) {
    if (offset >= 0 && num_bytes >= 0 && offset <= all && num_bytes <= all - offset) return;
    throw std::invalid_argument(std::string(name) + " of " + std::to_string(num_bytes) + " bytes at " +
                                std::to_string(offset) + " does not fit an arena of " + std::to_string(all) + " bytes");
}

inline void expect_address(const char* name, uintptr_t address, bool is_read) {
    if (address == 0 && is_read) throw std::invalid_argument(std::string(name) + " has no address");
}

// Seconds that a wait may take. An infinite one is as long as clocks count.
inline double timeout_of(double timeout_s) {
    if (std::isnan(timeout_s) || timeout_s < 0)
        throw std::invalid_argument("a timeout of " + std::to_string(timeout_s) + " s");
    constexpr double kLongest = 1e9;
    return timeout_s < kLongest ? timeout_s : kLongest;
}

// The value of an enumeration, which from Python may be any number.
template <typename Enum>
Enum known(const char* name, Enum value, Enum last) {
    within(name, static_cast<int64_t>(value), 0, static_cast<int64_t>(last));
    return value;
}

}  // namespace weave

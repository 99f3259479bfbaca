#include "reduction/hosts/schedule.h"

#include <algorithm>

namespace weave::hosts {
namespace {

int32_t power_of_two_below(int32_t hosts) {
    int32_t power = 1;
    while (2 * power <= hosts)
        power *= 2;
    return power;
}

bool is_recursive(Exchange exchange) {
    return exchange == Exchange::kDoubling || exchange == Exchange::kHalving;
}

}  // namespace

int32_t num_parts(Exchange exchange, int32_t hosts) {
    return exchange == Exchange::kHalving ? power_of_two_below(hosts) : 1;
}

std::vector<Step> schedule(Exchange exchange, int32_t host, int32_t hosts) {
    std::vector<Step> steps;
    if (!is_recursive(exchange)) return steps;
    const int32_t power = power_of_two_below(hosts), beyond = hosts - power;
    const Parts all = {0, num_parts(exchange, hosts)};
    if (host >= power) {
        steps.push_back({host - power, false, all, {}});
        steps.push_back({host - power, true, {}, all});
        return steps;
    }
    if (host < beyond) steps.push_back({host + power, false, {}, all});
    if (exchange == Exchange::kDoubling) {
        for (int32_t bit = 1; bit < power; bit *= 2)
            steps.push_back({host ^ bit, false, all, all});
    } else {
        Parts kept = all;
        for (int32_t bit = power / 2; bit > 0; bit /= 2) {
            const int32_t middle = (kept.begin + kept.end) / 2;
            const Parts low = {kept.begin, middle}, high = {middle, kept.end};
            const bool keeps_high = (host & bit) != 0;
            kept = keeps_high ? high : low;
            steps.push_back({host ^ bit, false, keeps_high ? low : high, kept});
        }
        for (int32_t bit = 1; bit < power; bit *= 2) {
            const int32_t own = host / bit * bit, theirs = own ^ bit;
            steps.push_back({host ^ bit, true, {own, own + bit}, {theirs, theirs + bit}});
        }
    }
    if (host < beyond) steps.push_back({host + power, true, all, {}});
    return steps;
}

Parts finishes(Exchange exchange, int32_t host, int32_t hosts) {
    if (host >= power_of_two_below(hosts)) return {};
    return exchange == Exchange::kHalving ? Parts{host, host + 1} : Parts{0, num_parts(exchange, hosts)};
}

bool is_untouched(const std::vector<Step>& steps, std::size_t index) {
    return std::none_of(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(index),
                        [](const Step& step) { return !step.received.empty(); });
}

std::vector<int32_t> peers(Exchange exchange, int32_t host, int32_t hosts) {
    std::vector<int32_t> found;
    if (is_recursive(exchange)) {
        for (const Step& step : schedule(exchange, host, hosts))
            found.push_back(step.peer);
    } else {
        for (int32_t other = 0; other < hosts; ++other) {
            if (other != host) found.push_back(other);
        }
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

}  // namespace weave::hosts

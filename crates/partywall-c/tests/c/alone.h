/* Nothing but the header, and what a program does with each of its structs. */
#include <partywall/partywall.h>

size_t sizes(void);

size_t sizes(void) {
    pw_domain_options domain = PW_INIT(pw_domain_options);
    pw_topic_options topic = PW_INIT(pw_topic_options);
    pw_subscriber_options subscriber = PW_INIT(pw_subscriber_options);
    pw_sample_info sample = PW_INIT(pw_sample_info);
    return domain.size + topic.size + subscriber.size + sample.size;
}

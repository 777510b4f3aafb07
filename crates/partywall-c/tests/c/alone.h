/* Nothing but the header, and what a program does with each of its structs. */
#include <partywall/partywall.h>

#define MAKE(type)                                        \
    type made_##type(void);                               \
    type made_##type(void) {                              \
        type made = PW_INIT(type);                        \
        return made;                                      \
    }

MAKE(pw_block_info)
MAKE(pw_segment_options)
MAKE(pw_claim_info)
MAKE(pw_input_info)
MAKE(pw_descriptors_info)
MAKE(pw_finding_info)
MAKE(pw_domain_options)
MAKE(pw_member_info)
MAKE(pw_domain_info)
MAKE(pw_name_info)
MAKE(pw_pool_options)
MAKE(pw_pool_info)
MAKE(pw_queue_options)
MAKE(pw_queue_info)
MAKE(pw_task_options)
MAKE(pw_open_options)
MAKE(pw_segment_info)
MAKE(pw_tensor_info)
MAKE(pw_semaphore_options)
MAKE(pw_semaphore_info)
MAKE(pw_subscriber_options)
MAKE(pw_sample_info)
MAKE(pw_timeline_options)
MAKE(pw_timeline_info)
MAKE(pw_topic_options)
MAKE(pw_topic_info)
MAKE(pw_event_info)

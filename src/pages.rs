//! Compiles and runs the examples of the pages.

#[doc = include_str!("../README.md")]
struct Readme;
#[doc = include_str!("../docs/TUTORIAL.md")]
struct Tutorial;
#[doc = include_str!("../docs/KEYS.md")]
struct Keys;
#[doc = include_str!("../docs/PROXIES.md")]
struct Proxies;
#[doc = include_str!("../docs/CHOOSING.md")]
struct Choosing;
#[doc = include_str!("../docs/CONCURRENCY.md")]
struct Concurrency;
#[doc = include_str!("../docs/COSTS.md")]
struct Costs;
#[doc = include_str!("../docs/PLANS.md")]
struct Plans;
#[doc = include_str!("../docs/OVERRIDES.md")]
struct OverridesGuide;
#[doc = include_str!("../docs/OPERATIONS.md")]
struct Operations;
#[doc = include_str!("../docs/HOWTO.md")]
struct HowTo;
#[doc = include_str!("../docs/TESTING.md")]
struct Testing;
#[doc = include_str!("../docs/KUBERNETES.md")]
struct Kubernetes;
#[doc = include_str!("../docs/FROM_GOVERNOR.md")]
struct FromGovernor;
#[doc = include_str!("../docs/CONFIGURATION.md")]
struct Configuration;

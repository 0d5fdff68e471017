//! Batches for the script on the server that `TIDEGATE_FUZZ_SERVER` names.
#![no_main]

use std::cell::RefCell;

use tidegate::fuzz::Server;

thread_local! {
    static SERVER: RefCell<Server> = {
        let url = std::env::var("TIDEGATE_FUZZ_SERVER").expect("TIDEGATE_FUZZ_SERVER is set");
        RefCell::new(Server::open(&url))
    };
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    SERVER.with_borrow_mut(|server| tidegate::fuzz::request(server, bytes));
});

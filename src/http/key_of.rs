//! How a key is read from a request.

use std::fmt;
use std::sync::Arc;

use http::HeaderName;

use super::client_ip::ClientIp;
use super::head::Head;
use crate::key::KeyWriter;

/// Whether a request has a key. Of a key of several parts, the highest one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Presence {
    Present,
    /// The key is an address that is trusted as a proxy's, and no client beyond it is known.
    Unreported,
    Missing,
    /// There are several values, and it is unknown which one others use.
    Ambiguous,
    /// The key is the client's address, and the server did not tell where the connection comes from.
    UnknownPeer,
}

type WritePart = dyn Fn(&Head<'_>, &mut KeyWriter<'_>) -> Presence + Send + Sync;

/// The key of a request: what tells its client from others.
///
/// The keys are those of the core: `KeyOf::route().and(KeyOf::function(..))` is the key `(route, text)`, so that
/// [`ActiveLimit::check`](crate::ActiveLimit::check) can be asked about the same bucket.
#[derive(Clone)]
pub struct KeyOf(Vec<Arc<WritePart>>);

impl KeyOf {
    /// The client's address as text, without its port: see [`ClientIp::key`]. The server must know where
    /// connections come from: see [`Peer`](super::Peer). A request of an unknown peer is answered with status 500.
    pub fn client(client: ClientIp) -> Self {
        Self::part(move |head, key| match head.peer() {
            Some(peer) => {
                let (address, is_unreported) = client.find(peer, head.headers);
                key.push(client.text(address).as_ref());
                if is_unreported { Presence::Unreported } else { Presence::Present }
            }
            None => Presence::UnknownPeer,
        })
    }

    /// The value of a header field, such as an API key, hashed: it is [`Hashed`](crate::Hashed) in the core, so
    /// that the store does not hold it.
    ///
    /// A request that has the field twice, or an empty one, has no key. Check values before the limit does (in an
    /// outer layer), because every value that a client invents is a client of its own.
    pub fn header(name: HeaderName) -> Self {
        Self::plain_header(name).hashed()
    }

    /// The value of a header field as it is. The store holds it, and people who can read the store can read it:
    /// use this for values that are no secret, such as the name of a tenant. Otherwise like
    /// [`header`](Self::header).
    pub fn plain_header(name: HeaderName) -> Self {
        Self::part(move |head, key| {
            let mut values = head.headers.get_all(&name).iter();
            match (values.next(), values.next()) {
                (Some(value), None) if !value.is_empty() => {
                    key.push(value.as_bytes());
                    Presence::Present
                }
                (_, Some(_)) => Presence::Ambiguous,
                (_, None) => Presence::Missing,
            }
        })
    }

    /// The route that the request matches, such as `/users/{id}`.
    #[cfg(feature = "axum")]
    pub fn route() -> Self {
        Self::function(|head, key| {
            if let Some(path) = head.extensions.get::<axum::extract::MatchedPath>() {
                key.push(path.as_str().as_bytes());
            }
        })
    }

    /// What a function writes. If it writes nothing, the key is missing. The function must not panic, because
    /// that ends the request's task.
    ///
    /// ```
    /// use tidegate::Key;
    /// use tidegate::http::KeyOf;
    ///
    /// #[derive(Clone)]
    /// struct Tenant(u32);
    ///
    /// let by_tenant = KeyOf::function(|head, key| {
    ///     if let Some(Tenant(number)) = head.extensions.get() {
    ///         number.write(key);
    ///     }
    /// });
    /// # let _ = by_tenant;
    /// ```
    pub fn function(write: impl Fn(&Head<'_>, &mut KeyWriter<'_>) + Send + Sync + 'static) -> Self {
        Self::part(move |head, key| {
            write(head, key);
            if key.is_empty() { Presence::Missing } else { Presence::Present }
        })
    }

    /// The empty key, for all requests.
    pub fn shared() -> Self {
        Self::part(|_, _| Presence::Present)
    }

    /// The hash of this key: see [`Hashed`](crate::Hashed).
    #[must_use]
    pub fn hashed(self) -> Self {
        Self::part(move |head, key| key.push_hashed_of(|key| self.write(head, key)))
    }

    /// The tuple of this key and another: `a.and(b).and(c)` is the key `(a, b, c)`. It is missing where one of
    /// them is.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    fn part(
        write: impl Fn(&Head<'_>, &mut KeyWriter<'_>) -> Presence + Send + Sync + 'static,
    ) -> Self {
        Self(vec![Arc::new(write)])
    }

    /// Writes the key of a request. What was written means nothing unless it is present.
    pub(super) fn write(&self, head: &Head<'_>, key: &mut KeyWriter<'_>) -> Presence {
        if let [write] = self.0.as_slice() {
            return write(head, key);
        }
        let mut presence = Presence::Present;
        for (index, write) in self.0.iter().enumerate() {
            if index > 0 {
                key.push(b":");
            }
            presence = presence.max(key.push_part_of(|part| write(head, part)));
        }
        presence
    }
}

impl fmt::Debug for KeyOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyOf").field("parts", &self.0.len()).finish()
    }
}

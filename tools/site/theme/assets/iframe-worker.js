// Browsers refuse workers at file: addresses, and the search is one. There, an <iframe> runs the worker's script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) => urls.reduce((done, each) => done.then(() => load(each)), Promise.resolve())
      const load = each => new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script")
        script.src = each
        script.onload = resolve
        script.onerror = reject
        frame.contentDocument.body.append(script)
      })
      this.ready = load(url)
      this.deliver = data => inside.dispatchEvent(new MessageEvent("message", { data }))
    }
    postMessage(data) { this.ready.then(() => this.deliver(data)) }
    terminate() {}
  }
}
